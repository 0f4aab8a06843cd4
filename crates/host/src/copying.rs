//! Copies of file contents: by shared extents where the file system can, else byte by byte. Owns no file.
//!
//! Invariant: a hole stays a hole; a long copy can be cancelled between steps.

use crate::error::HostError;
use rustix::fs::{SeekFrom, ioctl_ficlone, seek};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;

/// Bytes that are copied between two checks for cancellation.
const STEP_BYTES: u64 = 64 << 20;

/// Makes an empty file share all extents of another. Returns `false` if the file system cannot.
pub fn share(source: &File, target: &File) -> bool {
    ioctl_ficlone(target, source).is_ok()
}

/// Copies a range of a file to an offset of another that reads as zeroes. Beyond the source's end there are zeroes. Calls
/// back with the progress, and stops at an error.
pub fn copy(
    source: &File,
    range: Range<u64>,
    target: &File,
    to: u64,
    mut goes_on: impl FnMut(u64) -> Result<(), HostError>,
    failed: impl Fn(io::Error) -> HostError,
) -> Result<(), HostError> {
    let find = |what: SeekFrom, otherwise: u64| match seek(source, what) {
        Ok(at) => Ok(at.min(range.end)),
        // A hole reaches to the end.
        Err(Errno::NXIO) => Ok(range.end),
        // The file system does not report holes.
        Err(Errno::INVAL) => Ok(otherwise),
        Err(e) => Err(failed(e.into())),
    };
    let mut at = range.start;
    while at < range.end {
        at = find(SeekFrom::Data(at), at)?;
        let end = find(SeekFrom::Hole(at), range.end)?;
        while at < end {
            goes_on(at - range.start)?;
            let step = (end - at).min(STEP_BYTES);
            let copy = || {
                seek(source, SeekFrom::Start(at))?;
                seek(target, SeekFrom::Start(to + (at - range.start)))?;
                // The kernel copies if both file systems allow it.
                match io::copy(&mut source.take(step), &mut &*target)? {
                    n if n == step => Ok(()),
                    _ => Err(io::ErrorKind::UnexpectedEof.into()),
                }
            };
            copy().map_err(&failed)?;
            at += step;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    const MIB: u64 = 1 << 20;

    fn file(folder: &str, size: u64) -> File {
        let file = tempfile::tempfile_in(folder).unwrap();
        file.set_len(size).unwrap();
        file
    }

    fn goes_on(_: u64) -> Result<(), HostError> {
        Ok(())
    }

    #[test]
    fn holes_stay_and_what_is_between_is_copied_on_one_file_system_and_between_two() {
        for from in ["/var/tmp", "/dev/shm"] {
            let (source, target) = (file(from, 70 * MIB), file("/var/tmp", 200 * MIB));
            for at in [0, 5 * MIB, 66 * MIB + 4096, 70 * MIB - 512] {
                source.write_all_at(&[at as u8 | 1; 512], at).unwrap();
            }
            // Beyond the source's end as well.
            copy(&source, 4 * MIB..80 * MIB, &target, 100 * MIB, goes_on, |e| panic!("{e}")).unwrap();
            let mut expected = vec![0; 200 * MIB as usize];
            source.read_exact_at(&mut expected[100 << 20..166 << 20], 4 * MIB).unwrap();
            let mut found = vec![0; 200 * MIB as usize];
            target.read_exact_at(&mut found, 0).unwrap();
            assert!(found == expected, "{from}");
            assert!(target.metadata().unwrap().blocks() * 512 < MIB, "{from}: a hole was filled");
        }
    }

    #[test]
    fn who_may_not_go_on_stops_and_what_cannot_be_written_is_said() {
        let (source, target) = (file("/var/tmp", MIB), file("/var/tmp", MIB));
        source.write_all_at(&[1; 4096], 0).unwrap();
        let stop = |_| Err(HostError::invalid("told to stop"));
        let stopped = copy(&source, 0..MIB, &target, 0, stop, |e| panic!("{e}"));
        assert_eq!(stopped.unwrap_err().message, "told to stop");
        let full = File::options().write(true).open("/dev/full").unwrap();
        let failed = copy(&source, 0..MIB, &full, 0, goes_on, |e| HostError::invalid(e.kind().to_string()));
        assert_eq!(failed.unwrap_err().message, io::ErrorKind::StorageFull.to_string());
    }
}
