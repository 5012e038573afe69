"""Values set in a YAML text that is not ours: every other byte of it stays.

A parser finds the places, the text is spliced there, and what the result means is compared with what was meant; where they
differ nothing is changed. Loading and dumping again, as with ruamel.yaml, keeps comments, but not the indentation of lists,
folded lines, line ends and quotes of everything else. PyYAML is also what Hermes reads its file with.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from sparkguard.errors import CONFIG, SparkguardError

Path = tuple[str, ...]
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
# What a double-quoted string may not hold as itself, or would fold: YAML 1.1, 5.1 and 5.4.
_UNPRINTABLE = re.compile("[^\t\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_WORDS = {"y", "n", "yes", "no", "true", "false", "on", "off", "null"}
_HINT = "edit it by hand, or mend it and try again"


class _Loader(yaml.SafeLoader):
    """Also loads what has tags of somebody's own."""


def _tagged(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return (node.tag, loader.construct_pairs(node, deep=True))
    return (node.tag, loader.construct_sequence(node, deep=True) if isinstance(node, yaml.SequenceNode) else node.value)


_Loader.add_multi_constructor("!", _tagged)


class Document:
    """A text whose root is a mapping. Raises SparkguardError with the place and never with what stands there: it may be a key."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._value = self._load(text)
        self._root(text)

    def get(self, *path: str) -> Any:
        value = self._value
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def set(self, path: Path, value: Any) -> None:
        """A string, number, truth value, or a mapping of such; mappings on the way are made."""
        wanted = _unshared(self._value)
        parent = wanted
        for key in path[:-1]:
            if parent.get(key) is None:
                parent[key] = {}
            parent = parent[key]
            if not isinstance(parent, dict):
                raise _odd(path)
        if path[-1] in parent and parent[path[-1]] == value and type(parent[path[-1]]) is type(value):
            return
        parent[path[-1]] = value
        self._become(self._set(self._root(self.text), path, value), wanted, path)

    def delete(self, path: Path) -> None:
        parent = self.get(*path[:-1])
        if not isinstance(parent, dict) or path[-1] not in parent:
            return
        wanted = _unshared(self._value)
        at = wanted
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]
        self._become(self._delete(self._root(self.text), path), wanted, path)

    def _become(self, text: str, wanted: Any, path: Path) -> None:
        try:
            found = self._load(text)
        except SparkguardError:
            found = None
        if found != wanted:
            raise _odd(path)
        self.text, self._value = text, found

    # ---- reading

    @staticmethod
    def _load(text: str) -> Any:
        try:
            return yaml.load(text, _Loader)
        except yaml.MarkedYAMLError as error:
            # The error's own words quote the text.
            mark = error.problem_mark or error.context_mark
            where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise SparkguardError(f"it is no YAML that can be read{where}", _HINT, CONFIG) from None
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):
            raise SparkguardError("it is no YAML that can be read", _HINT, CONFIG) from None

    @staticmethod
    def _root(text: str) -> yaml.MappingNode:
        root = yaml.compose(text, Loader=_Loader)
        if not isinstance(root, yaml.MappingNode):
            raise SparkguardError("it holds no settings" if root is None else "it is no mapping of settings", _HINT, CONFIG)
        return root

    # ---- splicing

    def _set(self, root: yaml.MappingNode, path: Path, value: Any) -> str:
        node = root
        for depth, key in enumerate(path):
            pair = _find(node, key, path)
            if pair is None:
                return self._insert(node, path[depth:], value)
            found = pair[1]
            if depth == len(path) - 1 or _is_null(found):
                return self._replace(found, _flow(_nested(path[depth + 1 :], value)), path)
            if not isinstance(found, yaml.MappingNode):
                raise _odd(path)
            node = found
        raise AssertionError("an empty path")

    def _replace(self, node: yaml.Node, new: str, path: Path) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise _odd(path)
        start, end = node.start_mark.index, node.end_mark.index
        if start == end:  # nothing stands behind the colon
            new = " " + new
        if node.style in ("|", ">"):
            new += self._line_end
        return self.text[:start] + new + self.text[end:]

    def _insert(self, node: yaml.MappingNode, path: Path, value: Any) -> str:
        """As the last entry."""
        if node.flow_style:
            entry = f"{_scalar(path[0])}: {_flow(_nested(path[1:], value))}"
            if node.value:
                at, entry = _end(*node.value[-1]), ", " + entry
            else:
                at = node.end_mark.index - 1
            return self.text[:at] + entry + self.text[at:]
        column = node.value[0][0].start_mark.column
        at = self._line_after(*node.value[-1])
        before = "" if at == 0 or self.text[at - 1] == "\n" else self._line_end
        lines = _block(path, value, column)
        return self.text[:at] + before + "".join(line + self._line_end for line in lines) + self.text[at:]

    def _delete(self, root: yaml.MappingNode, path: Path) -> str:
        node: yaml.Node = root
        for key in path[:-1]:
            pair = _find(node, key, path)
            if pair is None:
                raise _odd(path)
            node = pair[1]
        assert isinstance(node, yaml.MappingNode)
        place = next((i for i, (key, _) in enumerate(node.value) if key.value == path[-1]), None)
        if place is None or len(node.value) < 2:
            raise _odd(path)
        key, found = node.value[place]
        if node.flow_style:
            if place:
                start, end = _end(*node.value[place - 1]), _end(key, found)
            else:
                start, end = key.start_mark.index, node.value[1][0].start_mark.index
        else:
            start = self.text.rfind("\n", 0, key.start_mark.index) + 1
            if self.text[start : key.start_mark.index].strip():
                raise _odd(path)
            end = self._line_after(key, found)
        return self.text[:start] + self.text[end:]

    def _line_after(self, key: yaml.Node, value: yaml.Node) -> int:
        """Where the line behind an entry of a block begins. Comments below belong to what follows."""
        end = _end(key, value)
        if end and self.text[end - 1] == "\n":  # behind a block scalar
            return end
        newline = self.text.find("\n", end)
        return len(self.text) if newline < 0 else newline + 1

    @property
    def _line_end(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"


def _find(node: yaml.Node, key: str, path: Path) -> tuple[yaml.Node, yaml.Node] | None:
    """The entry of that name. An alias is another place's value, and editing that would edit both."""
    if not isinstance(node, yaml.MappingNode):
        raise _odd(path)
    found = [pair for pair in node.value if isinstance(pair[0], yaml.ScalarNode) and pair[0].value == key]
    if len(found) > 1 or (found and _is_alias(*found[0])):
        raise _odd(path)
    return found[0] if found else None


def _is_alias(key: yaml.Node, value: yaml.Node) -> bool:
    return bool(value.start_mark.index < key.end_mark.index)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _end(key: yaml.Node, value: yaml.Node) -> int:
    """Where an entry's last character is over: a block's own mark lies behind the comments that follow it."""
    if _is_alias(key, value):
        raise _odd(())
    if isinstance(value, yaml.CollectionNode) and not value.flow_style and value.value:
        last = value.value[-1]
        return _end(*last) if isinstance(last, tuple) else _end(key, last)
    return int(value.end_mark.index)


def _odd(path: Path) -> SparkguardError:
    where = f"{'.'.join(path[:1])} " if path else "it "
    return SparkguardError(f"{where}is written in a way that cannot be edited without touching the rest", _HINT, CONFIG)


def _nested(path: Path, value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _block(path: Path, value: Any, column: int) -> list[str]:
    lines = []
    for depth, key in enumerate(path):
        end = f" {_flow(value)}" if depth == len(path) - 1 else ""
        lines.append(" " * (column + 2 * depth) + f"{_scalar(key)}:{end}")
    return lines


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(its)}" for key, its in value.items()) + "}"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """Plain where it can be read as nothing but that string; JSON's strings are YAML's, too."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return _UNPRINTABLE.sub(lambda it: f"\\U{ord(it[0]):08x}", json.dumps(value, ensure_ascii=False))


def _unshared(value: Any) -> Any:
    """A copy in which an anchor and its aliases are things apart: a change that reaches both is not what was meant."""
    try:
        if isinstance(value, dict):
            return {key: _unshared(its) for key, its in value.items()}
        return [_unshared(its) for its in value] if isinstance(value, list) else value
    except RecursionError:
        raise _odd(()) from None
