"""What a layer chooses is predicted from what the layer before has chosen."""

from __future__ import annotations

from deepnvme.streaming.experts.route_memory import RouteMemory


def test_a_similar_choice_before_predicts_what_was_chosen_last_after_it() -> None:
    routes = RouteMemory()
    assert routes.probable([1, 2]) == ()
    routes.note([0, 1, 2, 3], [7, 8])
    routes.note([4, 5, 6, 7], [1, 2])
    routes.note([0, 1, 2, 3], [8, 9])
    assert routes.probable([3, 2, 1, 0]) == (8, 9)
    assert routes.probable([4, 5, 6, 9]) == (1, 2)
    assert routes.probable([0, 1, 4, 5]) == ()


def test_the_oldest_routes_are_forgotten() -> None:
    routes = RouteMemory()
    routes.note([0, 1], [5])
    for expert in range(2, 600):
        routes.note([expert, expert + 1], [expert])
    assert routes.probable([0, 1]) == ()
    assert routes.probable([598, 599]) == (598,)
