"""The site: README, documents and lessons in both languages, with live figures. `python -m
minidist.site --out DIR` builds it; it opens from a folder, without a network."""
