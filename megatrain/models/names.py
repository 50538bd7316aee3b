"""The names under which a family's weights are published, which transformers' modules may not have.

Releases rename modules (GPT-NeoX's `embed_out` became `lm_head`) and rename weights on load and
save. We write published names, which other programs and releases read.
"""

from __future__ import annotations

from typing import Any

from megatrain.models.anatomy import Anatomy


def published_names(anatomy: Anatomy) -> dict[str, str]:
    """The published name of every tensor, tied aliases included, by the model's own name."""
    own = [spec.name for block in anatomy.blocks for spec in block.layout.tensors]
    own += [alias for alias, _ in anatomy.tied]
    renamings = _renamings_on_save(anatomy.family)
    result = {}
    for name in own:
        published = name
        for renaming in renamings:
            published, _ = renaming.rename_source_key(published)
        result[name] = published
    assert len(set(result.values())) == len(result), "two tensors would be published under one name"
    return result


def _renamings_on_save(family: str) -> list[Any]:
    """transformers' renamings for a family's causal LM, reversed; not its other rearrangements."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    mapping: Any = get_checkpoint_conversion_mapping  # untyped
    transforms = mapping(CAUSAL.get(family)) or mapping(family) or []
    # subclasses move prefixes and indices; for a new model transformers does not undo them either
    renamings = [step for step in reversed(transforms) if type(step) is WeightRenaming]
    return [renaming.reverse_transform() for renaming in renamings]
