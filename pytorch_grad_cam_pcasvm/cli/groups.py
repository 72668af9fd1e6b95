"""Photos that belong together: the same file twice, and photos of one object, which are in one folder."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def name_objects(paths: Sequence[Path], root: Path, level: int, *, has_classes: bool) -> list[str]:
    """Return the name of the object of each photo: its folders below its class's, down to a level.

    Args:
        paths: of the photos.
        root: their folder.
        level: 1 is the folders in it, 2 those in these, and so on.
        has_classes: whether the folders of level 1 are the classes.

    Raises:
        ValueError: that level is the classes, or a photo has no folder there.
    """
    if has_classes and level == 1:
        raise ValueError(
            f"--groups 1 is the folders of the classes in {root}: name the level of the objects, such as 2 for "
            f"{root / 'crack' / 'part07' / '3.jpg'}"
        )
    names = []
    for path in paths:
        folders = path.relative_to(root).parent.parts
        if len(folders) < level:
            inside = f"only {'/'.join(folders)}" if folders else "none"
            raise ValueError(f"--groups {level}: {path} has no folder at level {level} below {root}, {inside}")
        names.append("/".join(folders[int(has_classes) : level]))
    return names


def group_photos(paths: Sequence[Path], objects: Sequence[str] | None = None) -> Any:
    """Return the number of the group of each photo, shape (N,): of one object, or the same file; None: all differ.

    Args:
        paths: of the photos.
        objects: the name of the object of each; None: each is its own.
    """
    import numpy as np
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    alike = defaultdict[Any, list[int]](list)
    for row, name in enumerate(objects or ()):
        alike[name].append(row)
    sizes = defaultdict[int, list[int]](list)
    for row, path in enumerate(paths):
        if path.is_file():
            sizes[path.stat().st_size].append(row)
    for rows in sizes.values():
        for row in rows if len(rows) > 1 else ():  # files of different sizes differ
            alike[hashlib.sha256(paths[row].read_bytes()).digest()].append(row)
    pairs = [(rows[0], row) for rows in alike.values() for row in rows[1:]]
    if not pairs and objects is None:
        return None
    count, (first, second) = len(paths), np.array(pairs, int).reshape(-1, 2).T
    edges = coo_array((np.ones(len(pairs)), (first, second)), shape=(count, count))
    return connected_components(edges, directed=False)[1]
