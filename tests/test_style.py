"""The style of the code, as far as a program can see it."""

import ast
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "bursar"
MODULES = sorted(SOURCE.rglob("*.py"))
CODE = [*MODULES, *sorted(SOURCE.rglob("*.sql")), *sorted((ROOT / "tests").rglob("*.py"))]
CODE += [path for path in sorted((ROOT / "scripts").iterdir()) if path.is_file()]

PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

LINES_MAX = 800
LONGER: dict[str, str] = {}
EMPTY_WORDS = frozenset({"utils", "util", "helpers", "helper", "common", "manager", "base", "impl", "misc"})


def test_modules_are_short_enough_to_read() -> None:
    long = {
        str(path.relative_to(SOURCE)): lines
        for path in MODULES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LINES_MAX
    }
    assert set(long) == set(LONGER), f"over {LINES_MAX} lines: {long}; split what is new, take out what is not"


def test_modules_are_named_after_what_they_hold() -> None:
    empty = [
        str(path.relative_to(SOURCE))
        for path in MODULES
        if EMPTY_WORDS & {word for part in path.relative_to(SOURCE).with_suffix("").parts for word in part.split("_")}
    ]
    assert not empty


def test_every_module_says_first_what_it_is() -> None:
    silent = [
        str(path.relative_to(SOURCE))
        for path in MODULES
        if path.name not in ("__init__.py", "__main__.py")
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent


def test_every_package_names_the_module_to_read_first() -> None:
    unnamed = []
    for path in (path for path in MODULES if path.name == "__init__.py"):
        modules = [one for one in path.parent.glob("*.py") if one != path and "_pb2" not in one.name]
        first = re.search(r"\b[Rr]ead\s+`([\w/]+\.py)`", path.read_text(encoding="utf-8"))
        if len(modules) > 1 and (first is None or not (path.parent / first[1]).is_file()):
            unnamed.append(str(path.relative_to(SOURCE)))
    assert not unnamed


def test_nothing_is_left_for_later() -> None:
    # In two halves, so that this file is not found itself.
    fingerprints = re.compile(rf"\b({'TO' + 'DO'}|{'FIX' + 'ME'}|{'X' + 'XX'})\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in CODE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if fingerprints.search(line)
    ]
    assert not found


def test_objects_are_removed_in_one_place() -> None:
    # What has finalizers must not slip out by another way.
    found = [str(path.relative_to(SOURCE)) for path in MODULES if "batch.remove(" in path.read_text(encoding="utf-8")]
    assert found == ["commands/objects/removal.py"]


# Names that two classes share because they are the same thing: on the wire and in the rules, or at both ends of a call.
SAME_THING = frozenset(
    {
        "Billing", "Namespace", "NodeClaim", "Nomination", "PriceList", "PriorityClass", "ResourceQuota", "Taint",
        "Tenant", "Tier", "Toleration", "ConfigError", "Unavailable", "Cost", "StreamRefused",
    }
)  # fmt: skip


def test_one_word_names_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        if "_pb2" in path.name:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert set(shared) <= SAME_THING, f"rename what means something else: {shared}"
    assert set(shared) == SAME_THING, f"no longer shared: {SAME_THING - set(shared)}"


# The packages whose log events have a stable name and a sentence beside it.
LOGS_NAMED = (
    "*.py",
    "agent/**/*.py",
    "api/**/*.py",
    "bridges/**/*.py",
    "commands/**/*.py",
    "core/**/*.py",
    "loops/**/*.py",
    "ops/**/*.py",
    "rpc/**/*.py",
    "sim/**/*.py",
    "store/**/*.py",
)
EVENT_NAME = re.compile(r"[a-z]+(_[a-z]+)+")
LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "log"})


def test_log_events_have_a_name_and_a_sentence() -> None:
    found = []
    for path in sorted({path for pattern in LOGS_NAMED for path in SOURCE.glob(pattern)}):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="log" | "_log") | ast.Attribute(attr="_log"), attr=level)
                ) if level in LEVELS:
                    match node.args:
                        case [*_, ast.Constant(value=str(name))] if EVENT_NAME.fullmatch(name):
                            if any(one.arg == "message" for one in node.keywords):
                                continue
                    found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not found, 'write log.info("node_joined", message="the node has joined the cluster", node=name)'


# Words that only this project would use, with the field's word in their place where there is one.
PRIVATE = (
    "beat", "beating", "beats", "clerk", "company", "door", "doors", "house", "keeper", "kin", "leavings", "office",
    "offices", "room", "rooms", "tell", "telling", "tells", "tiding", "tidings", "told", "walk", "walked", "walking",
    "walks", "walls", "what waits", "whoever", "whom", "world",
)  # fmt: skip
# Words of identifiers, as far as PRIVATE has no place for them: most are plain English in a sentence.
NAMED_OTHERWISE = frozenset(PRIVATE) - {"beat", "keeper", "tell", "telling", "told", "walk", "walks"} | {
    "band", "bands", "chooser", "courier", "desk", "glance", "glimpse", "lineup", "lineups", "promised", "soiled",
    "spoken", "upkeep", "welcome",
}  # fmt: skip
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Tests are stories: these words are plain English in their names and texts.
NARRATIVE = frozenset({"tell", "telling", "tells", "told"})
# Names of tests are sentences.
IN_NAMES = NARRATIVE | {"walked", "walking", "whoever", "whom"}
# A page may say who did something, and by whose order.
IN_PAGES = frozenset({"whom"})
NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _comments(path: Path) -> Iterator[tokenize.TokenInfo]:
    with path.open("rb") as source:
        yield from (token for token in tokenize.tokenize(source.readline) if token.type == tokenize.COMMENT)


def _strings(path: Path) -> Iterator[tokenize.TokenInfo]:
    """The strings of a module, without names of keys and columns."""
    with path.open("rb") as source:
        strings = (token for token in tokenize.tokenize(source.readline) if token.type == tokenize.STRING)
        yield from (token for token in strings if not re.fullmatch(r'"\w+"', token.string))


def _one_line(text: str) -> str:
    return " ".join(text.split()) + "."


# To take a module apart takes long. A test does so only where the words it looks for occur at all.


def _matching(pattern: re.Pattern[str], paths: Iterable[Path]) -> Iterator[Path]:
    return (path for path in paths if pattern.search(path.read_text(encoding="utf-8")))


def _with_parts(parts: re.Pattern[str], words: Iterable[str], paths: Iterable[Path]) -> Iterator[Path]:
    """The modules in whose name or text such a part is one of these words."""
    wanted = frozenset(words)
    for path in paths:
        text = f"{path.stem} {path.read_text(encoding='utf-8')}"
        if not wanted.isdisjoint(word.lower() for word in parts.findall(text)):
            yield path


def _private(words: Iterable[str]) -> re.Pattern[str]:
    """Private words; names of code in backticks may contain them."""
    return re.compile(rf"(?<![-\w`])({'|'.join(words)})\b", re.IGNORECASE)


# A sentence such as "What is left of it" can be neither searched for nor read out of its context; a question may ask.
UNNAMED = re.compile(r"(?:^|(?<=[.:;!?] )|(?<=\| )|(?<=- ))(What|Who|Whoever|Whom|Those|Whose|Whatever)\b[^.?!]*[.!|]")


def test_every_sentence_names_its_subject() -> None:
    found = []
    for path in _matching(UNNAMED, MODULES):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = [*_docstrings(tree), *(one.string.lstrip("# ") for one in _comments(path))]
        found += [
            f"{path.relative_to(SOURCE)}: {found[0]}" for text in texts for found in UNNAMED.finditer(_one_line(text))
        ]
    assert not found


def test_pages_use_the_words_of_the_field() -> None:
    private, found = _private(word for word in PRIVATE if word not in IN_PAGES), []
    for path in PAGES:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        found += [f"{path.relative_to(ROOT)}: {word[0]}" for word in private.finditer(re.sub(r"`[^`]*`", "", text))]
        found += [f"{path.relative_to(ROOT)}: {one[0]}" for one in UNNAMED.finditer(_one_line(text))]
    assert not found


def test_texts_use_the_words_of_the_field() -> None:
    private = _private(PRIVATE)
    found = [
        f"{path.relative_to(SOURCE)}:{token.start[0]}: {word[0]}"
        for path in _matching(private, MODULES)
        for token in (*_comments(path), *_strings(path))
        for word in private.finditer(re.sub(r"\{[^{}]*\}", "", token.string))  # names in f-strings are code
    ]
    for path in sorted(SOURCE.rglob("*.sql")):
        # Migrations that were released are never edited, and names of statements are code.
        if path.parent.name != "migrations":
            comments = re.sub(r"^(?!\s*--)(.*)$|^-- name:.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            found += [f"{path.relative_to(SOURCE)}: {word[0]}" for word in private.finditer(comments)]
    assert not found


def test_identifiers_use_the_words_of_the_field() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in _with_parts(WORD, NAMED_OTHERWISE, MODULES)
        if "_pb2" not in path.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for part in ("id", "attr", "arg", "name", "asname")
        if isinstance(name := getattr(node, part, None), str)
        if not NAMED_OTHERWISE.isdisjoint(word.lower() for word in WORD.findall(name))
    }
    assert not found


def test_texts_of_tests_use_the_words_of_the_field() -> None:
    private = _private(word for word in PRIVATE if word not in NARRATIVE)
    found = []
    for path in _matching(private, sorted((ROOT / "tests").rglob("*.py"))):
        texts = (*_docstrings(ast.parse(path.read_text(encoding="utf-8"))), *(one.string for one in _comments(path)))
        found += [f"{path.relative_to(ROOT)}: {word[0]}" for text in texts for word in private.finditer(text)]
    assert not found


def test_tests_are_named_in_the_words_of_the_field() -> None:
    private = {*PRIVATE} - IN_NAMES
    found = []
    for path in _with_parts(re.compile(r"[^\W_]+"), private, sorted((ROOT / "tests").rglob("*.py"))):
        names = [
            path.stem,
            *(node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, NAMED)),
        ]
        found += [f"{path.relative_to(ROOT)}: {name}" for name in names if private & set(name.lower().split("_"))]
    assert not found
