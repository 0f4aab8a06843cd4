//! Computes the digests of a disk's chunks. Owns nothing; the format is the one that disks verify reads with.

use crate::error::HostError;
use crate::operations::Progress;
use rustix::fs::{Advice, SeekFrom, fadvise, seek};
pub use spillway_image::digests::CHUNK_BYTES;
pub(super) use spillway_image::digests::ChunkDigest;
use spillway_image::digests::{Root, of_chunk};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Reads a disk and passes on the digest of each chunk, in order; holes are not read. Returns the digest of all:
/// `sha256:` and 64 hexadecimal digits.
pub fn read(
    file: &File,
    progress: &Progress,
    mut each: impl FnMut(ChunkDigest) -> Result<(), HostError>,
    failed: impl Fn(io::Error) -> HostError,
) -> Result<String, HostError> {
    let size_bytes = file.metadata().map_err(&failed)?.len();
    // Read from the medium, not from the page cache.
    let _ = fadvise(file, 0, None, Advice::DontNeed);
    let mut buffer = vec![0; CHUNK_BYTES as usize];
    let zeroes = of_chunk(&buffer);
    let mut all = Root::new(size_bytes);
    let mut data_from = 0;
    for at in (0..size_bytes).step_by(CHUNK_BYTES as usize) {
        progress.goes_on()?;
        let len = (size_bytes - at).min(CHUNK_BYTES);
        if data_from < at + len {
            data_from = next_data(file, data_from.max(at), size_bytes).map_err(&failed)?;
        }
        let digest = if data_from >= at + len && len == CHUNK_BYTES {
            zeroes
        } else {
            let chunk = &mut buffer[..len as usize];
            file.read_exact_at(chunk, at).map_err(&failed)?;
            of_chunk(chunk)
        };
        all.add(&digest);
        each(digest)?;
        progress.add_done(len);
    }
    Ok(all.finish())
}

/// Offset of the next data at or after `from`; the size if there is none.
fn next_data(file: &File, from: u64, size: u64) -> io::Result<u64> {
    match seek(file, SeekFrom::Data(from)) {
        Ok(at) => Ok(at),
        Err(rustix::io::Errno::NXIO) => Ok(size),
        // The file system does not report holes.
        Err(rustix::io::Errno::INVAL) => Ok(from),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(size: u64, data: &[(u64, &[u8])]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        data.iter().for_each(|(at, bytes)| file.write_all_at(bytes, *at).unwrap());
        file
    }

    fn of(file: &File) -> (String, Vec<ChunkDigest>) {
        let mut list = Vec::new();
        let each = |digest| {
            list.push(digest);
            Ok(())
        };
        let root = read(file, &Progress::default(), each, |e| panic!("{e}")).unwrap();
        (root, list)
    }

    #[test]
    fn holes_and_zeroes_are_the_same() {
        let size = 5 * CHUNK_BYTES + 700;
        let sparse = file(size, &[(3 * CHUNK_BYTES + 5, b"data")]);
        let full = file(size, &[(0, &vec![0; size as usize]), (3 * CHUNK_BYTES + 5, b"data")]);
        assert_eq!(of(&sparse), of(&full));
        let differs = of(&file(size, &[(3 * CHUNK_BYTES + 5, b"dat4"), (size - 1, b"x")]));
        let same: Vec<bool> = differs.1.iter().zip(of(&sparse).1).map(|(a, b)| *a == b).collect();
        assert_eq!(same, [true, true, true, false, true, false]);
    }

    #[test]
    fn the_digest_is_the_one_that_other_tools_make() {
        // { printf 'spillway-image 1 512 1048576\n'; head -c 512 /dev/zero | openssl dgst -sha256 -binary; } | sha256sum
        let (root, list) = of(&file(512, &[]));
        assert_eq!((root.as_str(), list.len()), (ROOT_OF_512_ZEROES, 1));
        let roots: std::collections::HashSet<_> =
            [0, 1, 512, CHUNK_BYTES, CHUNK_BYTES + 512].iter().map(|&size| of(&file(size, &[])).0).collect();
        assert_eq!(roots.len(), 5, "sizes are told apart");
    }

    const ROOT_OF_512_ZEROES: &str =
        "sha256:e57ec059903e0f2a443907c7d65527ae46a2c5d3678c7c9a93620b4331092875";
}
