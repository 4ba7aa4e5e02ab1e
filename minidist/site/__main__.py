"""`python -m minidist.site --out DIR`: build the site in both languages. DIR/index.html opens from a
folder, without a network."""

import hashlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from minidist.console import Parser, folder_to_write
from minidist.errors import ConfigError, MinidistError
from minidist.files import scratch
from minidist.launch.own_python import code_command
from minidist.progress import progress
from minidist.site.pages import LANGUAGES, write_sources

SPHINX = "from sphinx.cmd.build import main; raise SystemExit(main(sys.argv[1:]))"
COLOURS = 256  # of a picture
FIRST = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>minidist</title>
<script>location.replace((navigator.language.startsWith("zh") ? "zh" : "en") + "/index.html")</script>
</head><body><p><a href="en/index.html">English</a> · <a href="zh/index.html">中文</a></p></body></html>
"""


def build(out: Path) -> None:
    """Write the site to a folder that is there. Raises: ConfigError if a package that builds it is
    missing, or Sphinx finds a fault."""
    missing = [name for name in ("sphinx", "myst_parser", "furo") if find_spec(name) is None]
    if missing:
        raise ConfigError(f'the site needs {", ".join(missing)}: pip install "minidist[site]"')
    for language in LANGUAGES:
        with scratch() as folder, progress(f"building the site: {language}"):
            write_sources(folder, language)
            options = ("-q", "-W", "--keep-going", "-b", "html", "-j", "auto")
            parsed = ("-d", str(folder / "doctrees"))  # 6 MB that no reader needs
            done = subprocess.run(
                code_command(SPHINX, *options, *parsed, str(folder), str(out / language)),
                env={**os.environ, "LC_ALL": "C.UTF-8"},  # Sphinx ends where a locale is missing
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        if done.returncode:
            raise ConfigError(
                f"Sphinx finds faults in the {language} pages:\n{done.stderr[-3000:]}"
            )
    share_pictures(out)
    reduce_colours(out)
    (out / "index.html").write_text(FIRST, encoding="utf-8")


def share_pictures(out: Path) -> None:
    """Let both languages' pages show one copy of each picture: the first language's."""
    first, *others = (out / language for language in LANGUAGES)
    known = {_digest(picture): picture for picture in (first / "_images").iterdir()}
    for site in others:
        moved = {
            picture.name: known[digest].name
            for picture in (site / "_images").iterdir()
            if (digest := _digest(picture)) in known
        }
        told = {name: f"../{first.name}/_images/{shared}" for name, shared in moved.items()}
        for page in site.rglob("*.html"):
            text = page.read_text(encoding="utf-8")
            page.write_text(_led(text, told), encoding="utf-8")
        for name in moved:
            (site / "_images" / name).unlink()


def reduce_colours(out: Path) -> None:
    """Write each picture with 256 colours: a third of the bytes, and no difference to see."""
    from PIL import Image

    for path in out.glob("*/_images/*.png"):
        with Image.open(path) as picture:
            reduced = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        reduced.save(path, optimize=True)


def _led(text: str, told: dict[str, str]) -> str:
    """Return a page whose pictures are those that `told` has by their names."""
    return re.sub(
        r"((?:\.\./)*)_images/([^\"]+)",
        lambda link: link[1] + told[link[2]] if link[2] in told else link[0],
        text,
    )


def _digest(picture: Path) -> bytes:
    return hashlib.sha256(picture.read_bytes()).digest()


def main() -> int:
    """Build the site; return 0, or 2 with one line for bad input."""
    parser = Parser(prog="python -m minidist.site", description=__doc__)
    parser.add_argument(
        "--out",
        type=folder_to_write,
        required=True,
        metavar="DIR",
        help="where the site is written",
    )
    arguments = parser.parse_args()
    try:
        build(arguments.out)
    except MinidistError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{arguments.out}/index.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
