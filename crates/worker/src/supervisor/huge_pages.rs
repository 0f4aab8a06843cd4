//! Measures how much of the RAM tier a worker has mapped by huge pages. Owns the last result.
//!
//! The kernel visits all memory of the worker for that, which takes about 12 ms for each GiB that is mapped by pages of 4 KiB.
//! So a thread measures. Invariant: [`HugePages::bytes`] waits at most [`PATIENCE`], and then returns the last result.

use super::memory::kib;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a caller waits for a measurement.
const PATIENCE: Duration = Duration::from_millis(20);

/// The last measurement.
#[derive(Debug, Default)]
pub(super) struct HugePages {
    last: Arc<Mutex<Measurement>>,
}

#[derive(Debug, Default)]
struct Measurement {
    worker: u32,
    bytes: u64,
    /// A thread is measuring.
    is_running: bool,
}

impl HugePages {
    /// Bytes of the slots that a worker has mapped by huge pages: now, or at the last measurement if a new one takes long.
    pub fn bytes(&self, worker: u32, data: &OwnedFd) -> u64 {
        let root = Path::new("/");
        let Some(which) = which_file(data).filter(|_| are_given(root)) else { return 0 };
        self.ask(worker, PATIENCE, move || huge_bytes_at(root, worker, &which).unwrap_or(0))
    }

    fn ask(&self, worker: u32, patience: Duration, look: impl FnOnce() -> u64 + Send + 'static) -> u64 {
        let mut last = lock(&self.last);
        if last.worker != worker {
            *last = Measurement { worker, ..Measurement::default() };
        }
        if !std::mem::replace(&mut last.is_running, true) {
            drop(last);
            let shared = Arc::clone(&self.last);
            let (done, answer) = channel();
            let thread = std::thread::Builder::new().name("huge-pages".into()).spawn(move || {
                let bytes = look();
                let mut last = lock(&shared);
                if last.worker == worker {
                    (last.bytes, last.is_running) = (bytes, false);
                }
                drop(last);
                // The caller has gone if it took long.
                let _ = done.send(());
            });
            last = match thread {
                Ok(_) => {
                    // On a timeout the last result is returned.
                    let _late = answer.recv_timeout(patience);
                    lock(&self.last)
                }
                Err(_) => {
                    let mut last = lock(&self.last);
                    last.is_running = false;
                    last
                }
            };
        }
        last.bytes
    }
}

fn lock(last: &Mutex<Measurement>) -> MutexGuard<'_, Measurement> {
    last.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Device and inode as /proc/PID/smaps shows them. The name is not enough: a VMM may give its memory the same name.
fn which_file(data: &OwnedFd) -> Option<[String; 2]> {
    let stat = rustix::fs::fstat(data).ok()?;
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    Some([format!("{major:02x}:{minor:02x}"), stat.st_ino.to_string()])
}

/// Whether the host gives huge pages to shared memory.
fn are_given(root: &Path) -> bool {
    fs::read_to_string(root.join("sys/kernel/mm/transparent_hugepage/shmem_enabled"))
        .is_ok_and(|switch| !switch.contains("[never]") && !switch.contains("[deny]"))
}

fn huge_bytes_at(root: &Path, worker: u32, which: &[String; 2]) -> Option<u64> {
    let smaps = fs::read_to_string(root.join(format!("proc/{worker}/smaps"))).ok()?;
    let (mut is_data, mut sum) = (false, 0u64);
    for line in smaps.lines() {
        if let Some(size) = line.strip_prefix("ShmemPmdMapped:") {
            sum = sum.saturating_add(if is_data { kib(size)? } else { 0 });
        } else if line.split(' ').next().is_some_and(|word| !word.ends_with(':')) {
            // The line that begins a mapping: addresses, rights, offset, device, inode, name.
            is_data = line.split_ascii_whitespace().skip(3).take(2).eq(which);
        }
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use super::super::memory::{create_data, tests::tree};
    use super::*;

    #[test]
    fn a_measurement_that_takes_long_is_not_waited_for() {
        let (pages, long, none) = (HugePages::default(), Duration::from_secs(60), Duration::ZERO);
        assert_eq!(pages.ask(1, long, || 5), 5);
        let (go, gone) = channel::<()>();
        let slow = move || {
            let _ = gone.recv();
            6
        };
        assert_eq!(pages.ask(1, none, slow), 5, "the last one");
        assert_eq!(pages.ask(1, long, || 7), 5, "one question at a time");
        assert_eq!(pages.ask(2, long, || 8), 8, "another worker");
        drop(go);
        assert_eq!(pages.ask(2, long, || 9), 9, "of the first one nothing is said any more");
    }

    /// A mapping as the kernel shows it, of so much by huge pages.
    fn mapping(at: u64, which: &str, name: &str, huge_kib: u64) -> String {
        format!(
            "{at:x}-{:x} rw-s 00000000 {which} {name}\nSize: 8192 kB\nRss: 9 kB\nShmemPmdMapped: {huge_kib:8} kB\n\
             FilePmdMapped: 8 kB\nVmFlags: rd wr sh mr mw me ms nr hg\n",
            at + (8 << 20)
        )
    }

    #[test]
    fn huge_pages_of_the_slots_are_counted_where_there_can_be_some_and_no_others() {
        let (at, ours) = (0x7f00_0000_0000, "/memfd:spillway-data (deleted)");
        let smaps = [
            // What a VMM has handed over, once under our name.
            mapping(at, "00:01 41", "/memfd:guest (deleted)", 65536),
            mapping(at + (32 << 20), "00:01 42", ours, 32768),
            mapping(at + (64 << 20), "00:01 7", ours, 4096),
            mapping(at + (72 << 20), "00:01 7", ours, 2048),
            mapping(at + (96 << 20), "fe:00 7", "/some/file", 16384),
        ];
        let smaps = ("proc/7/smaps", smaps.concat());
        let switch = "sys/kernel/mm/transparent_hugepage/shmem_enabled";
        let which = ["00:01".to_string(), "7".to_string()];
        for (setting, given) in [("[never] advise", false), ("never [deny]", false), ("never [advise]", true)]
        {
            let root = tree(&[(smaps.0, &smaps.1), (switch, setting)]);
            assert_eq!(are_given(root.path()), given, "{setting}");
            assert_eq!(huge_bytes_at(root.path(), 7, &which), Some(6 << 20));
            assert_eq!(huge_bytes_at(root.path(), 8, &which), None, "no such process");
        }
    }

    #[test]
    fn a_mapping_is_found_by_what_the_kernel_says_of_its_file() {
        let data = create_data(64 << 20).unwrap();
        let (prot, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice, which nobody looks into.
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, prot, flags, &data, 0) }.unwrap();
        let [device, inode] = which_file(&data).unwrap();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|l| l.contains(&format!(" {device} {inode} "))).unwrap();
        assert!(line.ends_with("/memfd:spillway-data (deleted)"), "{line}");
    }
}
