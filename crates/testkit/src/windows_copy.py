# Copies a folder into an NTFS volume with libntfs-3g, which needs no mount: VOLUME FOLDER SCATTERED.
import ctypes
import ctypes.util
import os
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
    must(ntfs.ntfs_inode_close(must(ntfs.ntfs_create(folder, 0, units, len(units) // 2, kind), path)) == 0, path)
    must(ntfs.ntfs_inode_close(folder) == 0, above)


def write(path, at, content):
    file = find(path)
    data = must(ntfs.ntfs_attr_open(file, DATA, unnamed, 0), path)
    must(ntfs.ntfs_attr_pwrite(data, at, len(content), content) == len(content), path)
    ntfs.ntfs_attr_close(data)
    must(ntfs.ntfs_inode_close(file) == 0, path)


image, tree, scattered = sys.argv[1:]
volume = must(ntfs.ntfs_mount(image.encode(), 0), image)
contents = {}
for folder, folders, files in os.walk(tree):
    inside = os.path.relpath(folder, tree)
    prefix = "" if inside == "." else inside + "/"
    for name in sorted(folders):
        create(prefix + name, FOLDER)
    for name in sorted(files):
        create(prefix + name, FILE)
        contents[prefix + name] = open(os.path.join(folder, name), "rb").read()
if scattered == "1":
    # Every second piece is written when the clusters after the one before are taken.
    for path, content in contents.items():
        for first in (0, PIECE):
            for at in range(first, len(content), 2 * PIECE):
                write(path, at, content[at : at + PIECE])
else:
    for path, content in contents.items():
        if content:
            write(path, 0, content)
must(ntfs.ntfs_umount(volume, 0) == 0, image)
