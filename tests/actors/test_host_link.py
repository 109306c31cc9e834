"""Copies in place of collectives: what goes out, what comes in, what the result is."""

import torch

from braid.actors.stage.host_link import HostLink


def test_a_gather_puts_the_peers_tokens_behind_its_own() -> None:
    link = HostLink(torch.device("cpu"), seed=5)
    x = torch.arange(12.0).view(3, 4)
    launch = link.all_gather(x)
    launch.issue().wait()
    assert launch.result.shape == (6, 4)
    assert torch.equal(launch.result[:3], x)
    assert torch.equal(launch.result[3:], link.received(x))
    assert torch.equal(link.sent(x), x)
    assert not torch.equal(link.received(x), x)


def test_a_scatter_sends_one_half_and_adds_to_the_other() -> None:
    link = HostLink(torch.device("cpu"), seed=5)
    x = torch.arange(24.0).view(6, 4)
    launch = link.reduce_scatter(x)
    launch.issue().wait()
    assert torch.equal(launch.result, x[:3] + link.received(x[:3]))
    assert torch.equal(link.sent(x[:3]), x[3:])
    assert torch.equal(x, torch.arange(24.0).view(6, 4))


def test_the_peer_is_the_same_every_time_and_depends_on_the_seed() -> None:
    x = torch.zeros(3, 4)
    first, again, other = (HostLink(torch.device("cpu"), seed=seed).received(x) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == x.dtype
    assert HostLink(torch.device("cpu")).received(x.double()).dtype == torch.float64
