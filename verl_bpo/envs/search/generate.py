"""Questions of several hops over invented people, for small policies, and the corpus that answers them.

The corpus tells of each person four others by the service they render; a question follows such relations from person to
person, one a hop. Names are made of syllables, so that no model knows them; they come from one small pool, whatever the seed,
so that each part of a name can be one token of a small vocabulary. No training question meets people of held-out questions.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations, product
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet

from verl_bpo.envs.manifest import open_folder, write_whole

RELATIONS = ("teacher", "doctor", "tailor", "baker")


@dataclass(frozen=True)
class Level:
    """How hard a question is."""

    hops: int
    facts: int = len(RELATIONS)
    """Facts in a passage: one, which a fitting query finds, or all of a person's, in which the right one must be read."""


LEVELS = {0: Level(3, facts=1), 1: Level(1), 2: Level(2), 3: Level(3), 4: Level(4)}
CORPUS = "corpus.jsonl"
_HELD_OUT = 0.25
"""Share of the people who are for held-out questions."""
_POOL = 32
"""Given names, and as many family names."""
_VERSION = 1


def make(out: Path, train: int, valid: int, seed: int, level: int) -> None:
    """What ``verl-bpo make-games --kind search`` does."""
    make_questions(out, train, valid, seed=seed, level=level)


def make_questions(out_dir: str | Path, train: int = 64, valid: int = 32, seed: int = 0, level: int = 3) -> Path:
    """Write ``train.parquet`` and ``valid.parquet``, in Search-R1's form with a column ``queries``, and ``corpus.jsonl``.

    The same arguments give the same questions. Nothing is done when they are there already; a folder made with other arguments
    is an error.

    Args:
        level: 0 to 4, see :data:`LEVELS`.

    Returns:
        ``out_dir``.

    Raises:
        ValueError: unknown level, a count below 1 or beyond what there is, or ``out_dir`` holds something else.
    """
    counts = {"train": train, "valid": valid}
    if level not in LEVELS:
        raise ValueError(
            f"level={level}: use one of {', '.join(map(str, LEVELS))}: the number of hops, 0 for three easy ones"
        )
    if min(counts.values()) < 1:
        raise ValueError(f"counts={counts}: each split needs at least one question")
    folder = Path(out_dir).expanduser()
    options = {
        "version": _VERSION,
        "kind": "search",
        "counts": counts,
        "seed": seed,
        "level": level,
        **asdict(LEVELS[level]),
    }
    if open_folder(folder, options, "*.parquet") is not None:
        return folder
    random = Random(f"{seed}/search")
    people = [f"{given} {family}" for given, family in product(*name_pool())]
    random.shuffle(people)
    held_out = round(_HELD_OUT * len(people))
    groups = {"train": people[held_out:], "valid": people[:held_out]}
    facts = {name: knowledge for group in groups.values() for name, knowledge in _facts(group, random).items()}
    passages = [text for name in people for text in _passages(name, facts[name], LEVELS[level].facts)]
    lines = [json.dumps({"id": str(i), "contents": text}) for i, text in enumerate(passages)]
    write_whole(folder / CORPUS, "\n".join(lines) + "\n")
    games = {CORPUS: hashlib.sha256("\n".join(lines).encode()).hexdigest()}
    for split, count in counts.items():
        chains = _chains(groups[split], facts, LEVELS[level].hops, count, random)
        rows = [_row(chain, split, index) for index, chain in enumerate(chains)]
        part = folder / f".{split}.part"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), part)
        os.replace(part, folder / f"{split}.parquet")
        games[f"{split}.parquet"] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    write_whole(folder / "manifest.json", json.dumps({"options": options, "games": games}, indent=1))
    return folder


def name_pool() -> tuple[list[str], list[str]]:
    """Given names, which end in a vowel, and family names, which end in a consonant: always the same."""
    random = Random("names")
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    stems = random.sample([a + b for a, b in permutations(syllables, 2)], 2 * _POOL)
    given = [stem.capitalize() for stem in stems[:_POOL]]
    family = [f"{stem.capitalize()}{random.choice('nkrsl')}" for stem in stems[_POOL:]]
    return given, family


@dataclass(frozen=True)
class _Chain:
    """``people[0]``'s ``relations[0]`` is ``people[1]``, and so on."""

    people: tuple[str, ...]
    relations: tuple[str, ...]

    @property
    def queries(self) -> list[str]:
        return [f"{name}'s {relation}" for name, relation in zip(self.people, self.relations)]


def _facts(group: Sequence[str], random: Random) -> dict[str, dict[str, str]]:
    """For each person who renders which service: four others of the group, in an order of the passage's own."""
    facts = {}
    for name in group:
        others = random.sample(group, len(RELATIONS) + 1)
        others = [other for other in others if other != name][: len(RELATIONS)]
        facts[name] = dict(zip(random.sample(RELATIONS, len(RELATIONS)), others))
    return facts


def _passages(name: str, knowledge: dict[str, str], size: int) -> list[str]:
    """What is known of a person, ``size`` facts a passage."""
    sentences = [f"{name}'s {relation} is {other}." for relation, other in knowledge.items()]
    parts = [sentences[start : start + size] for start in range(0, len(sentences), size)]
    return [f'"{name}"\n{" ".join(part)}' for part in parts]


def _chains(
    group: Sequence[str], facts: dict[str, dict[str, str]], hops: int, count: int, random: Random
) -> list[_Chain]:
    """Different chains that meet nobody twice."""
    starts = list(product(group, permutations(RELATIONS, hops)))
    random.shuffle(starts)
    chains: list[_Chain] = []
    for name, relations in starts:
        people = [name]
        for relation in relations:
            people.append(facts[people[-1]][relation])
        if len(set(people)) == len(people):
            chains.append(_Chain(tuple(people), relations))
        if len(chains) == count:
            return chains
    raise ValueError(f"{count} questions of {hops} hops are more than the {len(chains)} there are: ask for fewer")


def _row(chain: _Chain, split: str, index: int) -> dict[str, Any]:
    path = "".join(f"'s {relation}" for relation in chain.relations)
    question = f"Who is {chain.people[0]}{path}?"
    answers = [chain.people[-1]]
    return {
        "id": f"{split}_{index}",
        "question": question,
        "golden_answers": answers,
        "data_source": f"invented_{len(chain.relations)}_hops",
        "prompt": [{"role": "user", "content": question}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"index": index, "split": split},
        "queries": chain.queries,
    }
