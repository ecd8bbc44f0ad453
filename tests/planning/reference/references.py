"""A pool as explicit lists of references, one entry each."""


class Pool:
    """Blocks [owner][block] → list of reference kinds. Every call is refused whole, or done."""

    def __init__(self, num_owners, num_blocks, transfer, regular):
        self.transfer, self.regular = transfer, regular
        self.num_blocks = num_blocks
        self.held = {(o, x): [] for o in range(num_owners) for x in range(num_blocks)}

    def reserve(self, numbers):
        """Returns the lowest free blocks per owner, or None."""
        free = [[x for x in range(self.num_blocks) if not self.held[o, x]] for o in (0, 1)]
        if any(n > len(f) for n, f in zip(numbers, free, strict=True)):
            return None
        granted = [f[:n] for f, n in zip(free, numbers, strict=True)]
        for owner, blocks in enumerate(granted):
            for block in blocks:
                self.held[owner, block].append(self.transfer)
        return granted

    def acquire(self, listed, kind):
        """Returns whether the references were added."""
        if not self._is_sound(listed):
            return False
        if kind is not self.regular and not all(self.held[key] for key in listed):
            return False
        for key in listed:
            self.held[key].append(kind)
        return True

    def release(self, listed, kind):
        """Returns how many blocks were freed, or None if refused."""
        if not self._is_sound(listed) or not all(kind in self.held[key] for key in listed):
            return None
        for key in listed:
            self.held[key].remove(kind)
        return sum(1 for key in listed if not self.held[key])

    def _is_sound(self, listed):
        return len(set(listed)) == len(listed) and all(key in self.held for key in listed)
