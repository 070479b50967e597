"""What is raised when ranks fail; without torch, for whoever only catches it."""


class RanksFailed(RuntimeError):  # noqa: N818
    """Some ranks raised, died or did not finish; ``reports`` says what each of them did."""

    def __init__(self, world_size: int, reports: dict[int, str]) -> None:
        self.reports = reports  # in the order in which the failures were noticed
        returned = [rank for rank in range(world_size) if rank not in reports]
        head = f"{len(reports)} of {world_size} ranks failed; ranks that returned: {returned}"
        parts = [f"--- rank {rank} {report.rstrip()}" for rank, report in reports.items()]
        super().__init__("\n".join([head, *parts]))
