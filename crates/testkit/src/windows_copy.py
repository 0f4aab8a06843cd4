# Copies a folder into an NTFS volume with libntfs-3g, which needs no mount: VOLUME FOLDER SCATTERED.
import ctypes
import ctypes.util
import itertools
import os
import random
import sys

library = ctypes.util.find_library("ntfs-3g") or sys.exit("libntfs-3g is not installed (Debian: ntfs-3g)")
ntfs = ctypes.CDLL(library, use_errno=True)
pointer, number, long = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64
for name, result, arguments in [
    ("ntfs_mount", pointer, [ctypes.c_char_p, ctypes.c_ulong]),
    ("ntfs_umount", ctypes.c_int, [pointer, ctypes.c_int]),
    ("ntfs_inode_open", pointer, [pointer, ctypes.c_uint64]),
    ("ntfs_pathname_to_inode", pointer, [pointer, pointer, ctypes.c_char_p]),
    ("ntfs_inode_close", ctypes.c_int, [pointer]),
    ("ntfs_create", pointer, [pointer, number, ctypes.c_char_p, ctypes.c_uint8, number]),
    ("ntfs_delete", ctypes.c_int, [pointer, pointer, pointer, pointer, ctypes.c_char_p, ctypes.c_uint8]),
    ("ntfs_attr_open", pointer, [pointer, number, pointer, number]),
    ("ntfs_attr_pwrite", long, [pointer, long, long, ctypes.c_char_p]),
    ("ntfs_attr_close", None, [pointer]),
]:
    function = getattr(ntfs, name)
    function.restype, function.argtypes = result, arguments
unnamed = ctypes.addressof(ctypes.c_uint16.in_dll(ntfs, "AT_UNNAMED"))
ROOT, DATA, FILE, FOLDER, PIECE = 5, 0x80, 0o100000, 0o040000, 4096


def must(result, what):
    return result or sys.exit(f"{what}: {os.strerror(ctypes.get_errno())}")


def find(path):
    if not path:
        return must(ntfs.ntfs_inode_open(volume, ROOT), "/")
    return must(ntfs.ntfs_pathname_to_inode(volume, None, path.encode()), path)


def create(path, kind):
    above, _, name = path.rpartition("/")
    folder, units = find(above), name.encode("utf-16-le")
    created = ntfs.ntfs_create(folder, 0, units, len(units) // 2, kind)
    must(created is None or ntfs.ntfs_inode_close(created) == 0, path)
    must(ntfs.ntfs_inode_close(folder) == 0, above)
    return created is not None


def remove(path):
    above, _, name = path.rpartition("/")
    units = name.encode("utf-16-le")
    must(ntfs.ntfs_delete(volume, None, find(path), find(above), units, len(units) // 2) == 0, path)


def write(path, content):
    file = find(path)
    data = must(ntfs.ntfs_attr_open(file, DATA, unnamed, 0), path)
    pieces = (content[at : at + PIECE] for at in range(0, len(content), PIECE))
    is_written = all(
        ntfs.ntfs_attr_pwrite(data, n * PIECE, len(piece), piece) == len(piece) for n, piece in enumerate(pieces)
    )
    ntfs.ntfs_attr_close(data)
    must(ntfs.ntfs_inode_close(file) == 0, path)
    return is_written


image, tree, scattered = sys.argv[1:]
volume = must(ntfs.ntfs_mount(image.encode(), 0), image)
contents = {}
for folder, folders, files in os.walk(tree):
    inside = os.path.relpath(folder, tree)
    prefix = "" if inside == "." else inside + "/"
    for name in sorted(folders):
        must(create(prefix + name, FOLDER), name)
    for name in sorted(files):
        must(create(prefix + name, FILE), name)
        contents[prefix + name] = open(os.path.join(folder, name), "rb").read()
if scattered == "1":
    # The volume is filled with small files, and the space of half of them is free again.
    must(create("filler", FOLDER), "filler")
    fillers = map("filler/{}".format, itertools.count())
    written = list(itertools.takewhile(lambda path: create(path, FILE) and write(path, bytes(PIECE)), fillers))
    for path in random.Random(1).sample(written, len(written) // 2):
        remove(path)
for path, content in contents.items():
    if content:
        must(write(path, content), path)
must(ntfs.ntfs_umount(volume, 0) == 0, image)
