"""Prove that a schedule is complete, in order, free of deadlock and within a memory bound, before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from counterflow.parallel.pipeline.ir.action import SENDS, STAGE_WIDE, Action, Kind, Schedule
from counterflow.parallel.pipeline.ir.arrays import (
    KINDS,
    Bools,
    Ints,
    Products,
    leaves_of,
    live,
    maxima,
    running,
)
from counterflow.parallel.pipeline.ir.dependencies import (
    RULES,
    ScheduleError,
    Value,
    receive_of,
    replay,
    send_of,
)
from counterflow.parallel.pipeline.ir.text import grid

__all__ = ["Report", "ScheduleError", "verify"]

# Actions in which every holder of a stage takes part, in one order; RESHARD frees memory without a message.
COLLECTIVES = frozenset({Kind.UNSHARD, Kind.REDUCE_GRAD})

_VALUE_NAMES = {
    Value.ACTIVATION: ("activation", (Kind.F,)),
    Value.INPUT_GRADIENT: ("input gradient", (Kind.B, Kind.I)),
    Value.WEIGHT_GRADIENT: ("weight gradient", (Kind.B, Kind.W)),
}

Place = tuple[int, int]
"""(rank, index in its list)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a verified schedule needs; tuples have one entry per rank.

    executable: whether it has the actions that `lower` adds; otherwise it has compute actions only.
    peak_activations, peak_held_weight_gradients: see `simulate.peak_live`.
    peak_unsharded_stages: most stages that are whole at once (stages that are never sharded do not count).
    num_messages: sends between ranks.
    """

    executable: bool
    peak_activations: tuple[int, ...]
    peak_held_weight_gradients: tuple[int, ...]
    peak_unsharded_stages: tuple[int, ...]
    num_messages: int


def verify(
    schedule: Schedule, *, max_live_activations: int | None = None, forward_only: bool = False
) -> Report:
    """Check every rule; linear in the number of actions.

    Always: every stage and micro-batch has one F and either one B or one I and one W, on the rank that holds
    it; the ranks' lists, taken together with what each action needs, come to their end; no rank holds more
    than `max_live_activations`.

    With any action that passes add (an executable schedule), also: each value that another rank needs is sent
    and received once, in one order per channel; the lists come to their end with buffered sends (gloo), and with
    sends that wait for their receive on one in-order communicator per direction (NCCL); every use of a stage
    finds it unsharded, where the schedule unshards at all, and the end finds it resharded; each holder of a
    stage reduces its gradients once, after the last; the holders of a stage run their collectives in one order;
    activations that were moved out are back before their use.

    forward_only: the schedule of an evaluation, which has forwards and nothing of a backward. It keeps no activations.

    Raises ScheduleError (a ValueError): the first broken rule, the action, and the grid around it.
    """
    return _Verifier(schedule, forward_only).report(max_live_activations)


class _Verifier:
    """The checks of one schedule, in their order: each takes for granted what those before it have shown."""

    def __init__(self, schedule: Schedule, forward_only: bool) -> None:
        self.schedule, self.forward_only = schedule, forward_only
        self._check_placement()
        self.leaves = leaves_of(schedule.actions)
        self.products = Products(schedule)

    def report(self, max_live_activations: int | None) -> Report:
        leaves = self.leaves
        executable = not bool(leaves.where(*RULES).all())
        self._check_actions()
        made_at = self._check_counts()
        messages = self._check_messages(made_at) if executable else None
        if executable:
            self._check_collectives()
            self._check_reductions()
        self._check_order(made_at, messages)
        unsharded = self._check_unsharded()
        self._check_offloads()
        activations, held = live(leaves)
        if self.forward_only:
            activations = np.zeros_like(activations)
        if max_live_activations is not None and (above := activations > max_live_activations).any():
            rank = int(leaves.rank[np.argmax(above)])
            self._fail(
                f"rank {rank} holds {maxima(leaves, activations)[rank]} live activations at once, the bound is "
                f"{max_live_activations}",
                leaves.place(int(np.argmax(above))),
            )
        return Report(
            executable=executable,
            peak_activations=tuple(maxima(leaves, activations)),
            peak_held_weight_gradients=tuple(maxima(leaves, held)),
            peak_unsharded_stages=tuple(unsharded),
            num_messages=int(leaves.where(*SENDS).sum()),
        )

    def _fail(self, rule: str, place: Place | None = None) -> NoReturn:
        schedule, at = self.schedule, ""
        if place is not None and place[1] < len(schedule.actions[place[0]]):
            at = f" (rank {place[0]}, step {place[1]}: {schedule.actions[place[0]][place[1]]})"
        raise ScheduleError(
            f"schedule {schedule.name}: {rule}{at}\n{grid(schedule, mark=place)}", rule=rule, place=place
        )

    def _text(self, leaf: int) -> Action:
        rank, index = self.leaves.place(leaf)
        return self.schedule.actions[rank][index].leaves[int(self.leaves.half[leaf])]

    def _action(self, number: int) -> Action:
        rank, index = self._place(number)
        return self.schedule.actions[rank][index]

    def _place(self, number: int) -> Place:
        """Of an action by its number over all ranks."""
        rank = int(np.searchsorted(self.leaves.offsets, number, side="right")) - 1
        return rank, int(number - self.leaves.offsets[rank])

    def _check_placement(self) -> None:
        schedule = self.schedule
        num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
        if num_microbatches < 1 or num_microbatches % schedule.num_directions:
            self._fail(
                f"{num_microbatches} micro-batches are no equal shares of {schedule.num_directions} directions"
            )
        for ranks in schedule.placement:
            if len(ranks) != num_stages or not all(0 <= rank < schedule.num_ranks for rank in ranks):
                self._fail(
                    f"placement {ranks} does not put {num_stages} stages on {schedule.num_ranks} ranks"
                )
        for rank, actions in enumerate(schedule.actions):
            for index, action in enumerate(actions):
                is_pair = action.kind is Kind.OVERLAP_F_B
                if is_pair and [leaf.kind for leaf in action.parts] != [Kind.F, Kind.B]:
                    self._fail("a pair is one F and one B, in this order", (rank, index))

    def _check_actions(self) -> None:
        """Every action exists, and is on a rank that holds its stage for its micro-batch."""
        schedule, leaves = self.schedule, self.leaves
        num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
        stage_exists = (leaves.stage >= 0) & (leaves.stage < num_stages)
        microbatch_exists = (leaves.microbatch >= 0) & (leaves.microbatch < num_microbatches)
        stage = np.where(stage_exists, leaves.stage, 0)
        microbatch = np.where(microbatch_exists, leaves.microbatch, 0)
        is_wide = leaves.where(*STAGE_WIDE)
        holder = self.products.rank_of[stage, microbatch]
        holds = np.zeros((schedule.num_ranks, num_stages), dtype=np.bool_)
        for ranks in schedule.placement:
            holds[ranks, np.arange(num_stages)] = True
        rules: list[tuple[Bools, str]] = [
            (~stage_exists, "{leaf} is on a stage outside 0..{last_stage}"),
            (is_wide & (leaves.microbatch != -1), "{kind} is on a whole stage and has no micro-batch"),
            (
                is_wide & ~holds[leaves.rank, stage],
                "{leaf} is on a rank that does not hold stage {leaf.stage}",
            ),
            (~is_wide & ~microbatch_exists, "{leaf} has a micro-batch outside 0..{last_microbatch}"),
            (~is_wide & (holder != leaves.rank), "{leaf} is on rank {rank}, its stage is on rank {holder}"),
        ]
        broken = [(int(np.argmax(mask)), rule) for mask, rule in rules if mask.any()]
        if broken:
            first, rule = min(broken, key=lambda entry: entry[0])
            leaf = self._text(first)
            text = rule.format(
                leaf=leaf,
                kind=leaf.kind,
                rank=leaves.rank[first],
                holder=holder[first],
                last_stage=num_stages - 1,
                last_microbatch=num_microbatches - 1,
            )
            self._fail(text, leaves.place(first))

    def _check_counts(self) -> Ints:
        """Every product of every stage and micro-batch is made once; the action that makes it."""
        leaves, products = self.leaves, self.products
        if self.forward_only:
            backward = leaves.where(Kind.B, Kind.I, Kind.W, Kind.REDUCE_GRAD)
            if backward.any():
                first = int(np.argmax(backward))
                self._fail(f"{self._text(first)} is of a backward, in an evaluation", leaves.place(first))
        leaf, product = products.given(leaves)
        again = _repeated(leaf, product, products.count)
        if again is not None:
            first, number = again
            self._fail(f"the {self._describe(number)} is computed twice", leaves.place(first))
        made_at = products.makers(leaves)
        of_value = products.count // len(Value)
        needed = of_value if self.forward_only else products.count
        if (made_at[:needed] < 0).any():
            # The first in the order of stages and micro-batches, then of values.
            by_value = made_at[:needed].reshape(-1, of_value).T.ravel() < 0
            slot, value = divmod(int(np.argmax(by_value)), needed // of_value)
            missing = value * of_value + slot
            rank = products.holder[missing]
            self._fail(f"the {self._describe(missing)} is never computed on rank {rank}")
        return made_at

    def _describe(self, number: int) -> str:
        value, stage, microbatch = self.products.product(number)
        name, kinds = _VALUE_NAMES[value]
        makers = " or ".join(str(Action(stage, kind, microbatch)) for kind in kinds)
        return f"{name} of stage {stage} for micro-batch {microbatch} ({makers})"

    def _check_messages(self, made_at: Ints) -> _Messages:
        """Sends and receives pair off, in one order per channel; where each of them is."""
        leaves, products = self.leaves, self.products
        leaf, product = products.carried(leaves)
        useless = (product < 0) | (made_at[product] < 0) | (products.receiver[product] < 0)
        if useless.any():
            first = int(leaf[useless].min())
            self._fail(f"{self._text(first)} carries nothing that another rank needs", leaves.place(first))
        is_send = leaves.where(*SENDS)[leaf]
        again = _repeated(leaf, product * 2 + is_send, products.count * 2)
        if again is not None:
            self._fail(f"{self._text(again[0])} stands twice", leaves.place(again[0]))
        sent_at, received_at = np.full((2, products.count), -1, dtype=np.int64)
        sent_at[product[is_send]] = leaves.action[leaf[is_send]]
        received_at[product[~is_send]] = leaves.action[leaf[~is_send]]
        expected = np.flatnonzero((made_at >= 0) & (products.receiver >= 0))
        lost = expected[(sent_at[expected] < 0) | (received_at[expected] < 0)]
        if lost.size:
            number = int(lost[np.argmin(made_at[lost])])
            message = (send_of if sent_at[number] < 0 else receive_of)(products.product(number))
            self._fail(
                f"{message} is missing, so the {self._describe(number)} never arrives",
                self._place(int(made_at[number])),
            )
        channel = products.holder[expected] * self.schedule.num_ranks + products.receiver[expected]
        sent = expected[np.lexsort((sent_at[expected], channel))]
        received = expected[np.lexsort((received_at[expected], channel))]
        if (sent != received).any():
            position = int(np.argmax(sent != received))
            send, receive = int(sent_at[sent[position]]), int(received_at[received[position]])
            self._fail(
                f"rank {self._place(send)[0]} sends {self._action(send)} where rank {self._place(receive)[0]} "
                f"receives {self._action(receive)}: one channel needs one order",
                self._place(receive),
            )
        return _Messages(product=expected, sent_at=sent_at, received_at=received_at)

    def _collectives(self) -> dict[tuple[int, ...], dict[int, list[int]]]:
        """For each set of ranks that hold a stage together: each rank's collectives over it, in order."""
        replicas = [self.schedule.replicas_of(stage) for stage in range(self.schedule.num_stages)]
        groups: dict[tuple[int, ...], dict[int, list[int]]] = {
            group: {rank: [] for rank in group} for group in replicas
        }
        leaves, found = self.leaves, np.flatnonzero(self.leaves.where(*COLLECTIVES))
        for rank, stage, number in zip(
            leaves.rank[found].tolist(),
            leaves.stage[found].tolist(),
            leaves.action[found].tolist(),
            strict=True,
        ):
            groups[replicas[stage]][rank].append(number)
        return groups

    def _check_collectives(self) -> None:
        """The holders of a stage run the collectives over it in the same order."""
        for group, of_rank in self._collectives().items():
            first, *others = group
            for other in others:
                mine, theirs = of_rank[first], of_rank[other]
                for position in range(max(len(mine), len(theirs))):
                    ends = [
                        numbers[position] if position < len(numbers) else None for numbers in (mine, theirs)
                    ]
                    actions = [None if end is None else self._action(end) for end in ends]
                    if actions[0] != actions[1]:
                        at = ends[0] if ends[1] is None else ends[1]
                        assert at is not None
                        self._fail(
                            f"ranks {first} and {other} hold copies of the same stages, but collective {position} of "
                            f"rank {first} is {actions[0]} where rank {other} has {actions[1]}",
                            self._place(at),
                        )

    def _check_reductions(self) -> None:
        """Each holder of a stage reduces its gradients once, after its last weight gradient."""
        schedule, leaves = self.schedule, self.leaves
        held = leaves.rank * schedule.num_stages + leaves.stage
        reduced_at = np.full(schedule.num_ranks * schedule.num_stages, len(held), dtype=np.int64)
        reductions = np.flatnonzero(leaves.where(Kind.REDUCE_GRAD))
        again = _repeated(reductions, held[reductions], len(reduced_at))
        if again is not None:
            self._fail(f"stage {leaves.stage[again[0]]} is reduced twice", leaves.place(again[0]))
        reduced_at[held[reductions]] = reductions
        weights = np.flatnonzero(leaves.where(Kind.B, Kind.W))
        late = weights[weights > reduced_at[held[weights]]]
        if late.size:
            leaf = self._text(int(late[0]))
            self._fail(f"{leaf} comes after the reduction of stage {leaf.stage}", leaves.place(int(late[0])))
        for rank in range(0 if self.forward_only else schedule.num_ranks):
            for stage in schedule.stages_of(rank):
                if reduced_at[rank * schedule.num_stages + stage] == len(held):
                    self._fail(
                        f"rank {rank} never reduces the gradients of stage {stage} ({stage}REDUCE_GRAD)"
                    )

    def _check_unsharded(self) -> list[int]:
        """Stages are whole when they are used and sharded in the end; most that are whole at once, per rank."""
        leaves = self.leaves
        change = leaves.where(Kind.UNSHARD).astype(np.int64) - leaves.where(Kind.RESHARD)
        if not change.any():
            return [0] * self.schedule.num_ranks
        reads = leaves.where(*(kind for kind, rule in RULES.items() if rule.reads_weights))
        held = leaves.rank * self.schedule.num_stages + leaves.stage
        order = np.argsort(held, kind="stable")
        total = np.cumsum(change[order])
        is_first = np.diff(held[order], prepend=-1) != 0
        before = total - change[order]
        before -= before[is_first][np.cumsum(is_first) - 1]
        is_whole = np.empty_like(before)
        is_whole[order] = before
        rules: list[tuple[Bools, str]] = [
            ((change > 0) & (is_whole != 0), "stage {stage} is unsharded already"),
            ((change < 0) & (is_whole != 1), "stage {stage} is sharded already"),
            (reads & (is_whole != 1), "{action} uses stage {stage} while it is sharded"),
        ]
        broken = [(int(np.argmax(mask)), rule) for mask, rule in rules if mask.any()]
        if broken:
            first, rule = min(broken, key=lambda entry: entry[0])
            action = self._action(int(leaves.action[first]))
            self._fail(rule.format(stage=leaves.stage[first], action=action), leaves.place(first))
        whole_at_end = np.zeros(self.schedule.num_ranks * self.schedule.num_stages, dtype=np.int64)
        np.add.at(whole_at_end, held, change)
        if whole_at_end.any():
            rank, stage = divmod(int(np.argmax(whole_at_end)), self.schedule.num_stages)
            self._fail(f"rank {rank} ends with stage {stage} unsharded")
        return maxima(leaves, running(leaves, change))

    def _check_offloads(self) -> None:
        """What leaves was made here before, comes back once, and is back before its I or B."""
        leaves = self.leaves
        moves = np.flatnonzero(leaves.where(Kind.OFFLOAD, Kind.RELOAD))
        if not moves.size:
            return
        unit = leaves.stage * self.schedule.num_microbatches + leaves.microbatch
        relevant = np.flatnonzero(leaves.where(Kind.F, Kind.B, Kind.I, Kind.OFFLOAD, Kind.RELOAD))
        relevant = relevant[np.isin(unit[relevant], unit[moves])]
        made, is_away = set[int](), set[int]()
        for leaf, of_unit in zip(relevant.tolist(), unit[relevant].tolist(), strict=True):
            kind = KINDS[leaves.kind[leaf]]
            rule = None
            if kind is Kind.F:
                made.add(of_unit)
            elif kind is Kind.OFFLOAD:
                if of_unit not in made:
                    rule = "moves out what is not there: its forward is not done, or its backward is"
                elif of_unit in is_away:
                    rule = "moves out what is out already"
                is_away.add(of_unit)
            elif kind is Kind.RELOAD:
                rule = None if of_unit in is_away else "brings back what is not out"
                is_away.discard(of_unit)
            else:
                rule = "uses activations that are out (RELOAD is missing)" if of_unit in is_away else None
                made.discard(of_unit)
            if rule is not None:
                self._fail(f"{self._text(leaf)} {rule}", leaves.place(leaf))

    def _check_order(self, made_at: Ints, messages: _Messages | None) -> None:
        """The lists come to their end under each transport.

        What ends on the ordered transport ends with buffered sends too, which wait for less: a sound schedule is
        replayed once, and a stuck one a second time, to say where it hangs.
        """
        bounds: list[int] = self.leaves.offsets.tolist()
        waits = self._waits(made_at, messages)
        ordered = waits if messages is None else [*waits, *self._waits_on_ordered_transport(messages)]
        marks = self._marks(ordered)
        done = replay(bounds, *marks)
        if done == bounds[1:]:
            return
        rule = (
            "the ranks hang on one in-order communicator per direction where sends wait for their receives (NCCL), "
            "though not with buffered sends (gloo)"
        )
        buffered = self._marks(waits)
        done_buffered = replay(bounds, *buffered)
        if done_buffered != bounds[1:]:
            rule = "the ranks wait for each other, or an action comes before what it needs"
            marks, done = buffered, done_buffered
        stuck = [number for rank, number in enumerate(done) if number < bounds[rank + 1]]
        self._fail(
            f"{rule}: " + "; ".join(self._waiting(number, done, *marks) for number in stuck[:8]),
            self._place(stuck[0]),
        )

    def _waiting(self, number: int, done: list[int], first: list[int], awaited: list[int]) -> str:
        mark = next(
            mark for mark in awaited[first[number] : first[number + 1]] if done[self._place(mark)[0]] <= mark
        )
        return (
            f"rank {self._place(number)[0]} at {self._action(number)} waits for {self._action(mark)} of rank "
            f"{self._place(mark)[0]}"
        )

    def _marks(self, waits: list[tuple[Ints, Ints]]) -> tuple[list[int], list[int]]:
        """`waits` as `replay` takes them, without those for earlier actions of the same rank."""
        action = np.concatenate([action for action, _ in waits])
        awaited = np.concatenate([mark for _, mark in waits])
        offsets = self.leaves.offsets
        rank_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        counts = (rank_of[action] != rank_of[awaited]) | (awaited >= action)
        action, awaited = action[counts], awaited[counts]
        order = np.argsort(action, kind="stable")
        first = np.searchsorted(action[order], np.arange(self.leaves.num_actions + 1))
        return first.tolist(), awaited[order].tolist()

    def _waits(self, made_at: Ints, messages: _Messages | None) -> list[tuple[Ints, Ints]]:
        """(action, action that must come first) with buffered sends."""
        leaves, products = self.leaves, self.products
        leaf, product = products.needed(leaves)
        action = leaves.action[leaf]
        if messages is None:
            return [(action, made_at[product])]
        comes = products.holder[product] != leaves.rank[leaf]
        waits = [
            (action[~comes], made_at[product[~comes]]),
            # The receive must be posted here, and the send issued there.
            (action[comes], messages.received_at[product[comes]]),
            (action[comes], messages.sent_at[product[comes]]),
            (messages.sent_at[messages.product], made_at[messages.product]),
        ]
        # A collective begins when the others have come to it.
        for of_group in self._collectives().values():
            numbers = np.array(list(of_group.values()), dtype=np.int64)
            for shift in range(1, len(numbers)):
                before = np.roll(numbers, shift, axis=0) - 1
                starts_list = np.isin(before + 1, leaves.offsets)
                waits.append((numbers[~starts_list], before[~starts_list]))
        return waits

    def _waits_on_ordered_transport(self, messages: _Messages) -> list[tuple[Ints, Ints]]:
        """What a send waits for besides, where messages go one at a time.

        A rank has two communicators, to and from higher and lower ranks by the direction of travel. Each takes its
        sends and receives in the order of the rank's list, the next once the last is through; a message goes
        through when it is the turn of both its send and its receive, and the rank rests in the send until then.
        """
        product, products = messages.product, self.products
        sent_at, received_at = messages.sent_at[product], messages.received_at[product]
        upward = products.holder[product] < products.receiver[product]
        action = np.concatenate([sent_at, received_at])
        rank = np.concatenate([products.holder[product], products.receiver[product]])
        # When a receive before it is through. A send before it needs no mark: the rank itself rested there.
        through = np.concatenate([np.full(len(product), -1), sent_at])
        communicator = rank * 2 + np.tile(upward, 2)
        order = np.lexsort((action, communicator))
        follows = np.diff(communicator[order], prepend=-1) == 0
        turn = np.empty_like(action)
        turn[order] = np.where(follows, np.roll(through[order], 1), -1)
        of_send, of_receive = np.split(turn, 2)
        return [
            (sent_at, received_at),
            (sent_at[of_send >= 0], of_send[of_send >= 0]),
            (sent_at[of_receive >= 0], of_receive[of_receive >= 0]),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Messages:
    """product: those that travel. sent_at, received_at: the actions that send and receive each product, or -1."""

    product: Ints
    sent_at: Ints
    received_at: Ints


def _repeated(leaf: Ints, value: Ints, num_values: int) -> tuple[int, int] | None:
    """The first leaf whose value an earlier one has, and the value; None where all are different."""
    if (np.bincount(value, minlength=num_values) < 2).all():
        return None
    order = np.lexsort((leaf, value))
    is_again = np.diff(value[order], prepend=-1) == 0
    at = order[is_again]
    first = at[np.argmin(leaf[at])]
    return int(leaf[first]), int(value[first])
