"""Configs of axolotl, LLaMA-Factory and TRL into ours.

What becomes of each of their keys is said: mapped, without effect here, impossible or unknown.
"""

from megatrain.config.importing.convert import Imported, import_config

__all__ = ["Imported", "import_config"]
