"""The scheduler side against an independent model of the KV memory: `simulation.Simulation`."""

import pytest
import selection
from hypothesis.stateful import run_state_machine_as_test
from simulation import SETTINGS, SchedulerMachine, walk

from nanovllm.drafting.host_drafting import HostDrafting
from nanovllm.engine.cache import prefixes


def weaken_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use hashes of two bits: nearly every block collides with several others."""
    strong = prefixes.hash_block
    monkeypatch.setattr(
        prefixes, "hash_block", lambda parent, token_ids: strong(parent, token_ids) % 4
    )


@pytest.mark.slow
def test_state_machine() -> None:
    """In any order of events: right KV, no overtaking, no limit exceeded, no block lost."""
    run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)


@pytest.mark.slow
def test_state_machine_with_colliding_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit that is right only as long as no two hashes are equal."""
    weaken_hashes(monkeypatch)
    run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)


@pytest.mark.slow
@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("hundred", range(4))
def test_random_walks(hundred: int) -> None:
    """The same checks over hundreds of steps in full pools."""
    first = selection.NUMBER + 100 * hundred
    simulations = [walk(seed) for seed in range(first, first + 100)]
    # Walks that never meet pressure or forced tokens would prove nothing. The least of 36 hundreds
    # are 509 preemptions and 54 forced tokens, in the mean 1,200.
    assert sum(simulation.scheduler.num_preemptions for simulation in simulations) > 100
    forced = [s.scheduler.drafting for s in simulations if s.forces]
    only_forced = [s for s in forced if isinstance(s, HostDrafting) and not s.most_drafts]
    assert sum(drafting.num_drafted for drafting in only_forced) > 0


@pytest.mark.slow
@pytest.mark.sampled(share=0.25)
@pytest.mark.parametrize("hundred", range(4))
def test_random_walks_with_states(hundred: int) -> None:
    """The same beside states, whose checkpoints decide how long a hit is; and states alone."""
    first = selection.NUMBER + 100 * hundred
    simulations = [walk(seed, with_states=True) for seed in range(first, first + 100)]
    assert sum(simulation.scheduler.num_preemptions for simulation in simulations) > 100
    assert sum(simulation.num_restored for simulation in simulations) > 100


@pytest.mark.slow
@pytest.mark.sampled(share=0.35)
@pytest.mark.parametrize("hundred", range(3))
def test_random_walks_with_states_after_guesses(hundred: int) -> None:
    """Checkpoints of steps of which the host learns later how many tokens they have computed."""
    first = selection.NUMBER + 100 * hundred
    walks = [walk(seed, 100, with_states=True, guesses=True) for seed in range(first, first + 100)]
    assert sum(simulation.num_restored for simulation in walks) > 100


def test_random_walks_with_colliding_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit that is right only as long as no two hashes are equal."""
    weaken_hashes(monkeypatch)
    for seed in range(selection.NUMBER, selection.NUMBER + selection.examples(100)):
        walk(seed)
