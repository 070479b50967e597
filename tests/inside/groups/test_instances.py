"""Looking for objects of a class does not disturb other threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

from samestep.groups.pipelines import instances_of, with_subclasses
from tests.limits import TEST


class Sought:
    pass


class Derived(Sought):
    pass


def test_objects_of_a_class_and_of_those_derived_from_it():
    found = Sought(), Derived()
    assert set(instances_of(with_subclasses(Sought))) == set(found)
    assert instances_of([Derived]) == [found[1]]


def test_a_thread_that_builds_a_tuple_goes_on():
    """A tuple that is built from an iterator must not be held by anyone else meanwhile."""
    building, looking, built = (threading.Event() for _ in range(3))

    class Kinds(set):
        def __contains__(self, kind):  # asked while the objects that were found are held
            looking.set()
            assert built.wait(TEST)
            return super().__contains__(kind)

    def slowly(number):
        if number == 50:
            building.set()
            assert looking.wait(TEST)
        return number

    def builds():
        try:
            return tuple(map(slowly, range(200)))
        finally:
            built.set()

    sought = Sought()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(builds)
        assert building.wait(TEST)
        assert instances_of(Kinds([Sought])) == [sought]
        assert len(found.result(TEST)) == 200
