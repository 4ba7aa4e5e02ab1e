"""A live figure of the site by its name."""

from importlib import import_module

from minidist.site.live import Live
from minidist.site.pages import say


def figure(name: str, language: str = "en") -> Live:
    return import_module(f"minidist.site.live.{name}").figure(say(language))
