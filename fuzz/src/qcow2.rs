//! Bytes as a qcow2 file: the image is refused, or opened; then reads end with content or an I/O error, and what it
//! says of its extents lies inside it.

use crate::vmm;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spillway_image::{BaseReader, ExtentKind, MAX_JOB_BYTES, open_image};
use spillway_layout::{BaseCache, ImageFormat};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// How long a read of an image of some kilobytes may take.
const PATIENCE: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

/// Opens the bytes as an image and reads here and there.
pub fn qcow2_image(data: &[u8]) {
    let file = vmm::memory(data.len() as u64);
    file.write_all_at(data, 0).expect("inside the memory");
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let Ok(image) = open_image(&path, Some(ImageFormat::Qcow2), BaseCache::Host) else { return };
    let size = image.virtual_size_bytes;
    assert!(size > 0 && size.is_multiple_of(512));
    let mut reader = BaseReader::qcow2(image.file, size, false).expect("it was opened a moment ago");
    assert_eq!(reader.size_bytes(), size);

    let len = u64::from(MAX_JOB_BYTES).min(size);
    let offsets = [0, size - len, size / 2 / 512 * 512, 3 * 512, u64::MAX - 511, 0];
    for (job, offset) in (0..).zip(offsets) {
        let len = if offset < size { len.min(size - offset) } else { 512 };
        reader.submit(job, offset, len as u32, Vec::new());
    }
    for (job, offset) in (0..).zip(offsets) {
        let finished = loop {
            if let Some(finished) = reader.finished() {
                break finished;
            }
            let mut fds = [PollFd::from_borrowed_fd(reader.wake_fd(), PollFlags::IN)];
            match poll(&mut fds, Some(&PATIENCE)) {
                // The fuzzer has a timer.
                Err(rustix::io::Errno::INTR) => {}
                ready => assert_eq!(ready, Ok(1), "a read takes more than 20 s"),
            }
        };
        assert_eq!(finished.job, job, "jobs end in their order");
        if offset >= size {
            assert!(finished.result.is_err(), "a read outside the image");
        }
        for extent in finished.extents {
            assert!(extent.len > 0 && extent.offset.checked_add(extent.len).is_some_and(|end| end <= size));
            if let ExtentKind::Raw { file_offset } = extent.kind {
                let end = file_offset.checked_add(extent.len);
                assert!(end.is_some_and(|end| end <= data.len() as u64), "{extent:?} lies outside the file");
            }
        }
    }
    drop(reader);
    while base_readers() > 0 {
        std::thread::yield_now();
    }
}

/// Threads of readers that live. One that is ending would pass for a leak.
fn base_readers() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("there are threads");
    let is_reader = |name: &String| name.trim_end() == "base-reader";
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(is_reader)
        .count()
}
