"""Throughput over tokens per step, of ours and of its peers: the points of the plot in
docs/performance.md.
python -m benchmarks.sweep --model qwen2.5-7b --systems ours bound zero3 --tokens 4096 16384 65536
"""

from __future__ import annotations

from benchmarks.cases import sweep_case
from benchmarks.compare import arguments, measure
from benchmarks.systems import OURS

TOKENS = [4096, 8192, 16384, 32768, 65536, 131072]


def main() -> None:
    parser = arguments(__doc__, [OURS, "bound"])
    parser.add_argument(
        "--model", default="qwen2.5-7b", help="a shape of `megatrain bench`, or a model folder"
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="per step")
    args = parser.parse_args()
    measure([sweep_case(args.model, tokens) for tokens in args.tokens], args)


if __name__ == "__main__":
    main()
