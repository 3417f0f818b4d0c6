"""How an order to a faulty rank is spelled: shared by the side that gives it and the side that obeys."""

ORDERS = "orders"
MAKE_FAULTY = "mem_core.runtime.chaos.faults.faulty_runner:make_faulty"


def order_name(number: int, kind: str, rank: int) -> str:
    """File name of an order."""
    return f"chaos{number:04d}.{kind}.rank-{rank}"
