"""The resources of each kernel on each architecture, compiled without a GPU: python -m
minidist.kernels [NAME …]."""

import sys

from minidist.errors import KernelError
from minidist.kernels.compile import ARCHITECTURES, architectures, compile_for, sources


def main(names: list[str]) -> int:
    """Print a line per kernel: registers per thread, bytes of shared memory, bytes spilled. Returns
    the exit status."""
    cell = "{:>7}{:>7}{:>6}".format
    print(f"{'kernel':<52}" + "".join(f"{architecture:>20}" for architecture in ARCHITECTURES))
    print(f"{'':<52}" + cell("reg", "shared", "spill") * len(ARCHITECTURES))
    try:
        for source in sources():
            if names and source.path.stem not in names:
                continue
            rows: dict[str, list[str]] = {}
            for architecture in ARCHITECTURES:
                for usage in (
                    compile_for(source, architecture)
                    if architecture in architectures(source)
                    else ()
                ):
                    spilled = usage.spill_stores + usage.spill_loads
                    # too old for it: left empty
                    before = len(ARCHITECTURES) - len(architectures(source))
                    rows.setdefault(usage.kernel, [cell("-", "-", "-")] * before).append(
                        cell(usage.registers, usage.shared, spilled)
                    )
            for kernel, cells in rows.items():
                print(f"{kernel:<52}" + "".join(cells))
    except KernelError as error:
        print(f"minidist: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
