"""A resident pool in plain Python lists and sets: imports none of ours."""


class PathTwin:
    """Slots of each layer as (logical, physical), and free blocks of each owner."""

    def __init__(self, *, num_rows, num_tail, num_physical, retention, ownership):
        self.rows, self.retention = range(num_rows), retention
        self.is_group = ownership == "group"
        self.owner = [0 if self.is_group else row for row in self.rows]
        self.free = [set(range(num_physical)) for _ in set(self.owner)]
        self.num_physical = num_physical
        self.slots = [[] for _ in self.rows]
        self.tails = [[] for _ in self.rows]
        self.take_tail(num_tail)
        self.uploaded, self.moved, self.released, self.entries, self.peak = 0, 0, 0, 0, 0
        self.kinds, self.held_counts, self.unwanted_counts = [], [], []

    def reserve(self, counts):
        """The lowest free blocks of each owner."""
        taken = []
        for free, count in zip(self.free, counts, strict=True):
            taken.append(sorted(free)[:count])
            free.difference_update(taken[-1])
        return taken

    def take_tail(self, count):
        taken = self.reserve([count] * len(self.free))
        for row in self.rows:
            self.tails[row] += taken[self.owner[row]]

    def held(self, row):
        return {logical for logical, _ in self.slots[row]}

    def leave_tail(self, blocks):
        for row in self.rows:
            self.slots[row] += [(block, self.tails[row].pop(0)) for block in blocks]

    def select(self, wanted, ranked, num_leaving):
        """Takes wanted sets, and all candidates of each layer by falling score."""
        before = self.referenced()
        shared = self.retention != "layer_tables"
        missing = [sorted(wanted[row] - self.held(row)) for row in self.rows]
        if shared:
            most = max(map(len, missing))
            for row in self.rows:
                spare = [
                    block
                    for block in ranked[row]
                    if block not in wanted[row] and block not in self.held(row)
                ]
                missing[row] = sorted(missing[row] + spare[: most - len(missing[row])])
            assert len(set(map(len, missing))) == 1, "the twin knows no full plan"
        counts = [0] * len(self.free)
        for row in self.rows:
            counts[self.owner[row]] = max(counts[self.owner[row]], len(missing[row]))
        taken = self.reserve(counts)
        reserved = sum(self.num_physical - len(free) for free in self.free)
        self.peak = max(self.peak, reserved)
        for row in self.rows:
            self.slots[row] += zip(missing[row], taken[self.owner[row]], strict=False)
        self.uploaded += sum(map(len, missing))
        self.retain(wanted)
        now = self.referenced()
        for owner, blocks in enumerate(taken):
            before[owner] |= set(blocks)
        gone = [old - new for old, new in zip(before, now, strict=True)]
        for free, blocks in zip(self.free, gone, strict=True):
            free.update(blocks)
        self.released += sum(map(len, gone))
        self.take_tail(num_leaving)
        return [len(missing[row]) for row in self.rows]

    def referenced(self):
        found = [set() for _ in self.free]
        for row in self.rows:
            found[self.owner[row]] |= {physical for _, physical in self.slots[row]}
        return found

    def retain(self, wanted):
        kept = [
            [slot for slot, (logical, _) in enumerate(self.slots[row]) if logical in wanted[row]]
            for row in self.rows
        ]
        kind = "shared_table"
        if not self.agree(kept):
            kind = "byte_move" if self.retention == "shared_table" else self.retention
        if kind == "union":
            union = [sorted(set().union(*kept))] * len(self.rows)
            exact, kept = kept, union
            assert self.agree(union)
            self.unwanted_counts.append(
                sum(len(union[row]) - len(exact[row]) for row in self.rows) / len(self.rows)
            )
        else:
            self.unwanted_counts.append(0)
        changed = [sum(slot != place for place, slot in enumerate(row)) for row in kept]
        if kind == "byte_move":
            self.moved += sum(changed)
        else:
            self.entries += sum(changed) if kind == "layer_tables" else changed[0]
        for row in self.rows:
            old = self.slots[row]
            self.slots[row] = [
                (old[slot][0], old[place if kind == "byte_move" else slot][1])
                for place, slot in enumerate(kept[row])
            ]
        self.kinds.append(kind)
        self.held_counts.append(sum(map(len, self.slots)) / len(self.slots))

    def agree(self, kept):
        tables = [[self.slots[row][slot][1] for slot in kept[row]] for row in self.rows]
        return all(row == kept[0] for row in kept) and all(row == tables[0] for row in tables)
