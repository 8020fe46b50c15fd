"""TextWorld's PDDL games with the same texts at a fraction of the cost, and with snapshots.

:class:`FastPddlEnv` takes the place of ``textworld.envs.PddlEnv``. It shows the same feedback, admissible commands and
scores, and saves time in four places:

- a game file is translated to the planner's format once per process, not four times per reset;
- a text template, a query and an expression are parsed once per process, not at every use;
- text is generated without deep copies of the context;
- what an operator of the planner means (its command, its arguments) is worked out once per game, as long as its
  command's text doesn't depend on anything that changes.

Everything is done by subclasses, so other users of TextWorld in the same process see no difference. Facts are kept as
sorted tuples that are replaced, never changed in place: a snapshot shares them.

Written against textworld 1.7.0 and fast_downward_textworld 20.6.4, whose parsers it calls by their private names.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import fast_downward
from textworld.core import EnvInfos, GameState
from textworld.envs.pddl import PddlEnv, textgen
from textworld.envs.pddl import logic as pddl_logic
from textworld.envs.pddl.logic import model as pddl_model
from textworld.logic import Action, Placeholder, Proposition, Rule, Signature, Type, TypeHierarchy, Variable

# TextWorld's parsers keep their state in module globals and the translator swaps sys.stdout and sys.argv.
_PARSING = threading.RLock()

_GAMES_KEPT = 32
"""Translated games kept per process (1 to 3 MB each)."""
_PARSES_KEPT = 4096
"""Templates, queries and expressions kept per process. A domain has about a hundred, and each game adds its goal."""


@lru_cache(maxsize=_PARSES_KEPT)
def _parse_template(text: str) -> tuple[textgen.Symbol, ...]:
    with _PARSING:
        return tuple(textgen._parse_and_convert(text, rule_name="symbols"))


@lru_cache(maxsize=_PARSES_KEPT)
def _parse_query(expression: str) -> Rule:
    with _PARSING:
        return Rule.parse_conjunctive_query(expression)


@lru_cache(maxsize=_PARSES_KEPT)
def _compile_expression(expression: str) -> CodeType:
    return compile(expression.strip(), "<template>", "eval")


class FastGrammar(textgen.ContextSensitiveGrammar):
    """TextWorld's grammar, expanded recursively over symbols that are parsed once and never changed.

    A context needs the keys ``state``, ``variables``, ``mapping`` and ``entity_infos``.
    """

    @classmethod
    def from_rules(cls, rules: Mapping[str, list[Mapping[str, Any]]]) -> FastGrammar:
        grammar = cls()
        for name, alternatives in rules.items():
            for rule in alternatives:
                symbols = _parse_template(rule["rhs"])
                grammar.add_rule(textgen.ProductionRule(name, symbols, condition=rule.get("condition", "")))
        return grammar

    def derive(self, start: str, context: Mapping[str, Any]) -> str:
        return "".join([self._expand(symbol, context) for symbol in _parse_template(start)])

    def _expand(self, symbol: textgen.Symbol, context: Mapping[str, Any]) -> str:
        if isinstance(symbol, textgen.TerminalSymbol):
            return str(symbol.symbol)
        if isinstance(symbol, textgen.NonterminalSymbol):
            return "".join([self._expand(s, context) for s in self._choose(symbol, context).rhs])
        if isinstance(symbol, textgen.EvalSymbol):
            return str(eval(_compile_expression(symbol.expression), vars(textgen), context["variables"]))
        if isinstance(symbol, textgen.ConditionalSymbol):
            return "".join(self._alternatives(symbol, context))
        if isinstance(symbol, textgen.ListSymbol):
            return self._enumerate(self._alternatives(symbol.symbol, context), context)
        raise NotImplementedError(f"Unknown symbol: {type(symbol)}")

    def _choose(self, symbol: textgen.Symbol, context: Mapping[str, Any]) -> textgen.ProductionRule:
        """The first rule whose condition holds."""
        rules = self._rules.get(symbol.symbol)
        if not rules:
            raise textgen.CSGUnknownSymbolError(symbol)
        for rule in rules:
            if not rule.condition or any(True for _ in _matches(rule.condition, context)):
                return rule
        raise IndexError(f"no rule of '#{symbol}#' applies")

    def _alternatives(self, symbol: textgen.ConditionalSymbol, context: Mapping[str, Any]) -> list[str]:
        """The symbol's text once per match of its query, or once when it has none."""
        if not symbol.given:
            return [self._expand(symbol.expression, context)]
        infos = context["entity_infos"]
        texts = []
        for mapping in _matches(symbol.given, context):
            variables = {**context["variables"], **{ph.name: infos[var.name] for ph, var in mapping.items()}}
            inner = {**context, "variables": variables, "mapping": {**context["mapping"], **mapping}}
            texts.append(self._expand(symbol.expression, inner))
        return texts

    def _enumerate(self, items: list[str], context: Mapping[str, Any]) -> str:
        if not items:
            return self._expand(textgen.NonterminalSymbol("list_empty"), context)
        if len(items) == 1:
            return items[0]
        separator = self._expand(textgen.NonterminalSymbol("list_separator"), context)
        last_separator = self._expand(textgen.NonterminalSymbol("list_last_separator"), context)
        return separator.join(items[:-1]) + last_separator + items[-1]


def _matches(query: str, context: Mapping[str, Any]) -> Iterator[Mapping[Placeholder, Variable]]:
    return context["state"].all_assignments(_parse_query(query), context["mapping"])


class _LogicConverter(pddl_logic._ModelConverter):
    """Leaves the grammar's templates to :class:`FastGrammar`, which parses each of them once per process."""

    def walk_PddlDocumentNode(self, node: Any) -> tuple[dict[str, pddl_logic.Action], FastGrammar]:
        actions, rules = {}, {}
        for part in node.parts:
            if isinstance(part, pddl_model.ActionTypeNode):
                action = self.walk(part)
                actions[action.name.lower()] = action
                lines = [line for line in action.grammar.split("\n") if not line.lstrip().startswith("#")]
                rules.update(json.loads("\n".join(lines)))
            elif isinstance(part, pddl_model.ActionGrammarNode):
                rules.update(json.loads(self._unescape_block(part.code)))
        return actions, FastGrammar.from_rules(rules)


class FastLogic(pddl_logic.GameLogic):
    def __init__(self, domain: str, grammar: str):
        self.domain = domain
        self.types = TypeHierarchy()
        document = pddl_logic._PARSER.parse(grammar, rule_name="pddlStart")
        self.actions, self.grammar = _LogicConverter().walk(document)


@dataclass
class PddlGame:
    """A game file, translated. Shared by all environments of a process; nothing changes it after it is made."""

    data: dict[str, Any]
    logic: FastLogic
    sas: bytes
    parameters: dict[str, list[Placeholder]]
    """Per action of the domain."""
    object_types: dict[str, str]
    facts: list[Proposition]
    """Facts named in the problem. The planner's initial state adds what it derives."""
    fluents: frozenset[str]
    """Predicates that some action changes. The others are constant."""

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> PddlGame:
        logic = FastLogic(data["pddl_domain"], data["grammar"])
        argv = sys.argv
        try:
            task, sas = fast_downward.pddl2sas(data["pddl_domain"], data["pddl_problem"])
        finally:
            sys.argv = argv  # the translator leaves its own there
        types = {}
        for declared in task.types:
            # The translator adds its own root "object" to a domain's "object": the first counts.
            types.setdefault(declared.name, Type(declared.name, declared.supertype_names))
        for declared in types.values():
            logic.types.add(declared)
        object_types = {o.name: o.type_name for o in task.objects}
        changed = {effect.literal.predicate for action in task.actions for effect in action.effects}
        return cls(
            data=data,
            logic=logic,
            sas=sas.encode(),
            parameters={
                a.name: [Placeholder(p.name.strip("?"), p.type_name) for p in a.parameters] for a in task.actions
            },
            object_types=object_types,
            facts=[fact for atom in task.init if (fact := _initial_fact(atom, object_types)) is not None],
            fluents=frozenset(changed | {f"not_{name}" for name in changed}),
        )


def _initial_fact(atom: Any, object_types: Mapping[str, str]) -> Proposition | None:
    """An entry of the problem's ``:init`` as a fact; None for equalities, costs and distances."""
    if isinstance(atom, fast_downward.translate.pddl.conditions.Atom):
        name, arguments = atom.predicate, atom.args
        ignored = name == "="
    elif isinstance(atom, fast_downward.translate.pddl.f_expression.Assign):
        name, arguments = str(atom.expression.value), atom.fluent.args
        ignored = atom.fluent.symbol == "total-cost" or name.isdigit()
    else:
        return None
    return None if ignored else _fact(name, arguments, object_types)


def _fact(name: str, arguments: Iterable[str], object_types: Mapping[str, str]) -> Proposition:
    # TextWorld keeps every Proposition that was made by a call of the class until the process ends, half a megabyte a
    # game. They compare by value, so that nothing needs them to be unique.
    return type.__call__(Proposition, name, [Variable(argument, object_types[argument]) for argument in arguments])


def _parse_atom(text: str, object_types: Mapping[str, str]) -> tuple[Proposition, Proposition]:
    """A fact in the planner's writing, such as ``NegatedAtom opened(fridge_1)``, and its opposite."""
    kind, _, atom = text.partition(" ")
    name, _, listed = atom.removesuffix(")").partition("(")
    arguments = listed.split(", ") if listed else []
    fact, negated = _fact(name, arguments, object_types), _fact(f"not_{name}", arguments, object_types)
    return (negated, fact) if kind == "NegatedAtom" else (fact, negated)


def load_game(path: str | os.PathLike[str]) -> PddlGame:
    """Read and translate a ``.tw-pddl`` file; the last 32 games are kept (until their file changes).

    Raises:
        OSError: the file can't be read.
        KeyError, ValueError and others of TextWorld's parsers: it isn't a game.
    """
    stat = os.stat(path)
    with _PARSING:
        return _load_game(os.path.realpath(path), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=_GAMES_KEPT)
def _load_game(path: str, mtime_ns: int, size: int) -> PddlGame:
    with open(path, encoding="utf-8") as file:
        return PddlGame.from_data(json.load(file))


@dataclass(frozen=True)
class _Operator:
    """A grounded operator of the planner, as TextWorld sees it."""

    action: Action
    name: str
    effect_count: int


class FastPddlState(pddl_logic.PddlState):
    """The present state: the planner holds it, and the facts mirror it for text generation.

    ``_facts`` maps a signature to a sorted tuple. Objects neither appear nor vanish, so variables aren't counted.
    """

    def __init__(self, downward_lib: Any, game: PddlGame):
        self.game = game
        self.downward_lib = downward_lib
        self._logic = game.logic
        self.name2type = game.object_types
        self._known_operators: dict[int, _Operator] = {}
        self._known_effects: dict[bytes, tuple[Proposition, Proposition]] = {}
        self.read_fluent = False
        """Set when a predicate that can change is looked up."""

        downward_lib.load_sas(game.sas)
        atoms = (fast_downward.Atom * downward_lib.get_state_size())()
        downward_lib.get_state(atoms)
        true_atoms = [atom for atom in atoms if not atom._name.startswith(b"Negated")]
        by_signature = defaultdict(set)
        for fact in [*game.facts, *(_parse_atom(atom.name, self.name2type)[0] for atom in true_atoms)]:
            by_signature[fact.signature].add(fact)
        self._facts = defaultdict(tuple, {signature: tuple(sorted(facts)) for signature, facts in by_signature.items()})

    def save(self) -> tuple[int, dict[Signature, tuple[Proposition, ...]]]:
        return self.downward_lib.get_state_id(), self._facts.copy()

    def load(self, saved: tuple[int, dict[Signature, tuple[Proposition, ...]]]) -> None:
        state_id, facts = saved
        self.downward_lib.set_state_id(state_id)
        self._facts = facts.copy()

    def facts_with_signature(self, sig: Signature) -> tuple[Proposition, ...]:
        if sig.name in self.game.fluents:
            self.read_fluent = True
        return self._facts.get(sig, ())

    def add_fact(self, prop: Proposition) -> None:
        facts = self._facts[prop.signature]
        i = bisect_left(facts, prop)
        if i == len(facts) or facts[i] != prop:
            self._facts[prop.signature] = (*facts[:i], prop, *facts[i:])

    def remove_fact(self, prop: Proposition) -> None:
        facts = self._facts[prop.signature]
        i = bisect_left(facts, prop)
        if i < len(facts) and facts[i] == prop:
            self._facts[prop.signature] = facts[:i] + facts[i + 1 :]

    def all_applicable_actions(self) -> list[Action]:
        count = self.downward_lib.get_applicable_operators_count()
        raw = (fast_downward.Operator * count)()
        self.downward_lib.get_applicable_operators(raw)
        by_name = {}  # the planner lists an operator once per way to meet its precondition; the first one counts
        for entry in raw:
            operator = self._known_operators.get(entry.id) or self._describe(entry)
            by_name.setdefault(operator.name, operator.action)
        return list(by_name.values())

    def _describe(self, entry: fast_downward.Operator) -> _Operator:
        name, *arguments = entry.name.split()
        action = Action(name=name, preconditions=[], postconditions=[])
        action.id = entry.id
        action.mapping = {ph: Variable(arg, ph.type) for ph, arg in zip(self.game.parameters[name], arguments)}
        action.command_template = self._logic.actions[name].template
        action.feedback_rule = self._logic.actions[name].feedback_rule
        operator = _Operator(action, entry.name, entry.nb_effect_atoms)
        self._known_operators[entry.id] = operator
        return operator

    def apply(self, action: Action) -> None:
        effects = (fast_downward.Atom * self._known_operators[action.id].effect_count)()
        self.downward_lib.apply_operator(action.id, effects)
        for atom in effects:
            key = atom._name
            if key not in self._known_effects:
                self._known_effects[key] = _parse_atom(atom.name, self.name2type)
            fact, opposite = self._known_effects[key]
            self.remove_fact(opposite)
            self.add_fact(fact)


# Planners are reused, never unloaded: the copies of the library share a registry whose entries point into the copy that
# made them, so `fast_downward.close_lib` crashes the process, at its exit or at once when other threads use a planner.
_IDLE_PLANNERS: list[Any] = []


def _take_planner() -> Any:
    """A copy of the planner's library that no other environment of this process uses."""
    try:
        return _IDLE_PLANNERS.pop()
    except IndexError:
        planner = fast_downward.load_lib()
        planner.get_state_id.restype = int
        planner.set_state_id.restype = None
        return planner


class FastPddlEnv(PddlEnv):
    """``textworld.envs.PddlEnv`` made fast, with ``save`` and ``load_saved``.

    The game state holds ``feedback``, ``raw``, ``admissible_commands``, ``won``, ``lost``, ``score``, ``done``, ``moves``
    and ``last_command``; facts and planner's policies aren't offered.
    """

    def __init__(self, infos: EnvInfos | None = None):
        super(PddlEnv, self).__init__(infos)  # PddlEnv's own would load a new planner
        self.downward_lib = _take_planner()

    def load(self, filename: str) -> None:
        self._game_file = filename
        self._game = load_game(filename)
        self._game_data = self._game.data
        self._logic = self._game.logic
        self.walkthrough = self._game.data.get("walkthrough")
        self._commands: dict[int, str] = {}
        self._pddl_state = FastPddlState(self.downward_lib, self._game)
        self._initial = self._pddl_state.save()
        self._entity_infos = self._get_entity_infos()

    def reset(self) -> GameState:
        self._pddl_state.load(self._initial)
        # Only now: a wrapper may have given names since the game was loaded.
        self._names = {entity: info.name for entity, info in self._entity_infos.items()}
        self.prev_state = None
        self.state = GameState()
        self._last_action = None
        self._moves = 0
        self.state.feedback = self.state.raw = self._derive("#intro#", {})
        self._gather_infos()
        return self.state

    def save(self) -> dict[str, Any]:
        """The whole state, valid in this environment until its next ``load``."""
        return {
            "planner": self._pddl_state.save(),
            "state": GameState(self.state),
            "last_action": self._last_action,
            "moves": self._moves,
        }

    def load_saved(self, saved: dict[str, Any]) -> GameState:
        """Go back to what :meth:`save` returned, any number of times."""
        self._pddl_state.load(saved["planner"])
        self.state = GameState(saved["state"])
        self._last_action = saved["last_action"]
        self._moves = saved["moves"]
        return self.state

    def close(self) -> None:
        """Free the game and hand the planner to the next environment. Safe to call twice."""
        planner = self.__dict__.pop("downward_lib", None)
        if planner is not None:
            self._pddl_state = None
            planner.cleanup()
            if (
                _IDLE_PLANNERS is not None
            ):  # emptied already when textworld's __del__ comes here as the interpreter ends
                _IDLE_PLANNERS.append(planner)

    def _derive(self, rule: str, mapping: Mapping[Placeholder, Variable]) -> str:
        context = {
            "state": self._pddl_state,
            "variables": {ph.name: self._entity_infos[var.name] for ph, var in mapping.items()},
            "mapping": mapping,
            "entity_infos": self._entity_infos,
        }
        return self._logic.grammar.derive(rule, context)

    def _command(self, action: Action) -> str:
        """The text that stands for ``action`` in the present state."""
        command = self._commands.get(action.id)
        if command is None:
            self._pddl_state.read_fluent = False
            template = self._derive(action.command_template, action.mapping)
            command = template.format(**self._names)
            if not self._pddl_state.read_fluent:
                self._commands[action.id] = command
        return command

    def _gather_infos(self) -> None:
        state = self.state
        state["won"] = self._pddl_state.check_goal()
        state["lost"] = False
        state["_last_action"] = self._last_action
        state["_valid_actions"] = self._pddl_state.all_applicable_actions()
        state["_valid_commands"] = [self._command(action) for action in state["_valid_actions"]]
        state["admissible_commands"] = sorted(set(state["_valid_commands"]))
        state["moves"] = self._moves
