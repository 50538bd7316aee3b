"""Small tasks for lm-evaluation-harness, from files alone: choices, letters, a text, answers."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.commands import write_jsonl

COUNTS = [
    {
        "end": end,
        "right": end % 3,
        "choices": [" ".join(map(str, range(1, end + more))) for more in (1, 2, 4)],
        "text": f"Count to {end}. " + "1 2 3 4 5 6 7 8 9 " * 5 * end,
    }
    for end in (2, 3, 5, 4, 9, 7)
]

TASKS = {
    # continuations of several tokens and of unequal length
    "counting": """
output_type: multiple_choice
doc_to_text: "Count to {{end}}.\\n"
doc_to_choice: choices
doc_to_target: right
fewshot_split: test
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    # of one token each, after the same context; some are longer than the model reads
    "letters": """
output_type: multiple_choice
doc_to_text: "{{text}} Is {{end}} even?"
doc_to_choice: ["y", "n"]
doc_to_target: "{{end % 2}}"
metric_list: [{metric: acc}]
""",
    # longer than the model reads
    "reading": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "Count to {{end}}.\\n1 2"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["5"], max_gen_toks: 9, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def write_tasks(folder: Path) -> Path:
    """A folder for --include-path."""
    folder.mkdir()
    rows = write_jsonl(folder / "counts.jsonl", COUNTS)
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
        files = f"dataset_kwargs: {{data_files: {{test: {rows}}}}}"
        (folder / f"{name}.yaml").write_text(f"{head}{files}{text}")
    (folder / "both.yaml").write_text(
        "group: both\ntask: [counting, letters]\naggregate_metric_list: [{metric: acc}]\n"
    )
    (folder / "pair.yaml").write_text("group: pair\ntask: [counting, letters]\n")
    return folder
