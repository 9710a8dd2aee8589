"""The corpus: text of files, copies, and the command on a small repository."""

import json
import random
import subprocess
import sys

import pytest

from common.errors import UserError
from data.shards import open_shards
from data.tokenizer import get_tokenizer
from dev import corpus
from measure import leak

WORDS = "of and to in that for with this on from which river stone window garden letter morning doctor music".split()


def prose(seed, sentences):
    generator = random.Random(seed)
    return [f"The {' '.join(generator.choices(WORDS, k=14))} {seed} {i}." for i in range(sentences)]


CNXML = """<?xml version="1.0"?><document><title>Light</title><metadata><md:title>Light</md:title></metadata>
<para>It is
<term>fast</term>: <m:math><m:mi>c</m:mi></m:math> &lt; 4e8.</para>
<figure><caption>A lamp</caption></figure></document>"""
HTML = "<h2>A</h2><!-- no --><p>One <a href='x'>link</a>\n{{Macro('y')}}</p><pre>code</pre>"
MARKDOWN = """---
title: no
---
# A [link](http://x_(y))[!INCLUDE [x](y)], a\\_b and ![image](y.png)

``` c
code
```  
| a | table |



The *end* &amp; &lt;b&gt;."""
BOOK = "Header\n*** START OF THIS BOOK ***\n\nOne\n  line.\n\n\nTwo.\n*** END OF THIS BOOK ***"


@pytest.mark.parametrize(
    "suffix, source, text",
    [
        (".cnxml", CNXML, "Light\n\nIt is fast: c < 4e8."),
        (".html", HTML, "A\n\nOne link"),
        (".md", MARKDOWN, "# A link, a_b and\n\nThe *end* & <b>."),
        (".txt", BOOK, "One line.\n\nTwo."),
    ],
)
def test_text_of_files(suffix, source, text):
    assert corpus.tidy(corpus.TEXT_OF[suffix](source)) == text


def test_prose_and_parts():
    text = "\n\n".join(prose(0, 300))
    assert corpus.is_prose(text) and not corpus.is_prose(text[:300])
    assert not corpus.is_prose("x = 1; y[2] += 3\n" * 99)
    parts = corpus.cut(text)
    assert "\n\n".join(parts) == text and len(parts) == 2 and len(parts[0]) >= corpus.PART


def test_a_sentence_stays_once_and_copies_go():
    a, b, c = (prose(seed, 10) for seed in range(3))
    text = lambda sentences: " ".join(sentences).encode()  # noqa: E731
    seen = set()
    near_copy = [*a[:7], *b[:3]]
    documents = [(0, text(a)), (1, text(near_copy)), (2, text([*b, a[3].upper(), "Short one.", *c[:2], b[0]]))]
    assert corpus.without_repeats(documents, seen) == [(0, text(a)), (2, text([*b, "Short one.", *c[:2]]))]
    assert corpus.without_repeats([(0, text(c))], seen) == [(0, text(c[2:]))]
    assert corpus.without_repeats([(0, text(c))], seen) == []


@pytest.fixture
def sources(tmp_path):
    """A JSON list of one repository, with 40 files of which the second half repeats sentences of the first."""
    repository = tmp_path / "owner" / "name"
    (repository / "text").mkdir(parents=True)
    for number in range(40):
        sentences = prose(number, 30)
        if number >= 20:
            sentences[5:9] = prose(number - 20, 4)
        (repository / "text" / f"{number}.md").write_text("\n\n".join(sentences))
    (repository / "README.md").write_text("\n\n".join(prose(99, 50)))
    (repository / "text" / "copy.md").write_text("\n\n".join(prose(7, 30)[1:]))
    git = ["git", "-C", repository, "-c", "user.name=a", "-c", "user.email=b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "text"], ["config", "uploadpack.allowFilter", "1"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    source = dict(repository=f"file://{repository}", commit=commit, files=["/text/*.md"], license="CC0")
    path = tmp_path / "sources.json"
    path.write_text(json.dumps([source]))
    return path


def make(sources, out, monkeypatch, workers=1):
    flags = (
        f"--clones {sources.parent / 'clones'} --sources {sources} --out {out} --shard_size 9000 --workers {workers}"
    )
    monkeypatch.setattr(sys, "argv", ["corpus.py", *flags.split()])
    corpus.main()
    return json.loads((out / "shards.json").read_text())


def test_the_command_makes_shards_without_leak(sources, tmp_path, monkeypatch, capsys):
    manifest = make(sources, tmp_path / "out", monkeypatch)
    assert make(sources, tmp_path / "again", monkeypatch, workers=2) == manifest
    val, train = (open_shards(tmp_path / "out", split) for split in ("val", "train"))
    (source,) = manifest["source"]["repositories"]
    assert source["val"]["documents"] == 1 and source["train"]["documents"] == 39  # neither README.md nor the copy
    assert leak.measure_leak([shard[:] for shard in train], val[0][:])[0] == 0
    text = get_tokenizer().decode([token for shard in (*val, *train) for token in shard[:].tolist()])
    assert text.count("<|endoftext|>") == 40
    assert all(text.count(sentence) == 1 for number in range(20) for sentence in prose(number, 30))
    assert all(shard["sha256"] in capsys.readouterr().out for shard in manifest["shards"][:1])


def test_a_repository_that_is_gone_is_one_line(sources, tmp_path, monkeypatch):
    content = sources.read_text()
    for old, new, complaint in (("name", "gone", "does not appear"), ('"license"', '"licence"', "license")):
        sources.write_text(content.replace(old, new))
        with pytest.raises(UserError, match=complaint):
            make(sources, tmp_path / "out", monkeypatch)
