//! The processor cores of a measurement: which there are, on which a thread runs, and how far apart two are.
//!
//! Invariant: the cross-core time is measured between the two cores that the measurement itself uses.

use crate::load::Rng;
use crate::shared::SharedMemory;
use anyhow::{Context, Result, ensure};
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::Serialize;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// The cores that this process may use.
pub fn available() -> Result<Vec<usize>> {
    let set = sched_getaffinity(None).context("cannot read the CPU affinity")?;
    Ok((0..CpuSet::MAX_CPU).filter(|&c| set.is_set(c)).collect())
}

/// Keeps the calling thread on one core.
pub fn pin(core: usize) -> Result<()> {
    keep(None, core)
}

/// Keeps the first thread of another process on one core.
pub fn pin_process(pid: u32, core: usize) -> Result<()> {
    keep(Some(Pid::from_raw(pid.try_into()?).context("a process id")?), core)
}

fn keep(pid: Option<Pid>, core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(pid, &set).with_context(|| format!("cannot run on core {core}"))
}

/// Time for a cache line to go from one core to the other, one way, in nanoseconds: the median of short bursts
/// in which two threads hand a number back and forth.
pub fn cross_core_ns(a: usize, b: usize) -> Result<f64> {
    ensure!(a != b, "the cross-core time needs two cores");
    const BURSTS: usize = 21;
    const TURNS: u32 = 10_000;
    let ball = AtomicU32::new(0);
    let rounds = BURSTS as u32 * TURNS;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            pin(b)?;
            for turn in 0..rounds {
                while ball.load(Ordering::Acquire) != turn * 2 + 1 {
                    std::hint::spin_loop();
                }
                ball.store(turn * 2 + 2, Ordering::Release);
            }
            anyhow::Ok(())
        });
        let this = scope.spawn(|| {
            pin(a)?;
            let mut bursts = Vec::with_capacity(BURSTS);
            for burst in 0..BURSTS as u32 {
                let begin = Instant::now();
                for turn in burst * TURNS..(burst + 1) * TURNS {
                    ball.store(turn * 2 + 1, Ordering::Release);
                    while ball.load(Ordering::Acquire) != turn * 2 + 2 {
                        std::hint::spin_loop();
                    }
                }
                bursts.push(begin.elapsed().as_nanos() as f64 / f64::from(TURNS) / 2.0);
            }
            anyhow::Ok(median(&mut bursts))
        });
        let ns = this.join().map_err(|_| anyhow::anyhow!("the measuring thread panicked"))?;
        other.join().map_err(|_| anyhow::anyhow!("the answering thread panicked"))??;
        ns
    })
}

/// Time to copy 4 KiB to a random place in 1 GiB of shared memory, in nanoseconds, on one core: what the machine's
/// memory allows at the moment to a disk that lives in it. The median of short bursts.
pub fn cold_copy_ns(core: usize) -> Result<f64> {
    const BYTES: usize = 1 << 30;
    const PIECE: usize = 4096;
    std::thread::scope(|scope| {
        let copies = scope.spawn(|| {
            pin(core)?;
            let mut memory = SharedMemory::new(BYTES)?;
            let memory = memory.slice(0, BYTES);
            let source = vec![0xa5u8; 16 * PIECE];
            memory.chunks_exact_mut(source.len()).for_each(|to| to.copy_from_slice(&source));
            let mut rng = Rng::new(1);
            let mut bursts = Vec::new();
            for _ in 0..21 {
                const COPIES: usize = 4000;
                let begin = Instant::now();
                for i in 0..COPIES {
                    let to = rng.below((BYTES / PIECE) as u64) as usize * PIECE;
                    let from = i % 16 * PIECE;
                    memory[to..to + PIECE].copy_from_slice(&source[from..from + PIECE]);
                }
                bursts.push(begin.elapsed().as_nanos() as f64 / COPIES as f64);
            }
            anyhow::Ok(median(&mut bursts))
        });
        copies.join().map_err(|_| anyhow::anyhow!("the copying thread panicked"))?
    })
}

/// What one thread on a core can do to memory, in bytes a second: write(2) of 512 KiB at a time into a new memfd of 1 GiB, and
/// copies of as much to memory that is there.
pub fn memory_limits(core: usize) -> Result<[f64; 2]> {
    const BYTES: usize = 1 << 30;
    const PIECE: usize = 512 << 10;
    std::thread::scope(|scope| {
        let limits = scope.spawn(|| {
            pin(core)?;
            let mut source = SharedMemory::new(64 << 20)?;
            let source = source.slice(0, 64 << 20);
            source.fill(7);
            let mut memory = SharedMemory::new(BYTES)?;
            let begin = Instant::now();
            for (at, from) in (0..BYTES).step_by(PIECE).zip(source.chunks(PIECE).cycle()) {
                memory.store(at as u64, from)?;
            }
            let stored = begin.elapsed();
            let memory = memory.slice(0, BYTES);
            memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
            let begin = Instant::now();
            for (to, from) in memory.chunks_mut(PIECE).zip(source.chunks(PIECE).cycle()) {
                to.copy_from_slice(from);
            }
            anyhow::Ok([stored, begin.elapsed()].map(|time| BYTES as f64 / time.as_secs_f64()))
        });
        limits.join().map_err(|_| anyhow::anyhow!("the copying thread panicked"))?
    })
}

/// The same write(2), in bytes a second, for somebody who sleeps: a thread on `client` numbers the blocks of 1 MiB, as a driver does,
/// hands them over, and sleeps until it is told that they are written. The thread on `core`, which writes them, does not sleep.
pub fn memory_limit_handed_over(core: usize, client: usize) -> Result<f64> {
    const BYTES: usize = 1 << 30;
    const REQUEST: usize = 1 << 20;
    const PIECE: usize = 512 << 10;
    // Whoever fails lets the other one end: all is asked for then, or done.
    let asked = AtomicUsize::new(0);
    let done = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE).context("eventfd")?;
    let tell = |requests: usize| rustix::io::write(&done, &(requests as u64).to_ne_bytes());
    let request = Mutex::new(vec![7u8; REQUEST]);
    let content = || request.lock().unwrap_or_else(PoisonError::into_inner);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let write = || {
                pin(core)?;
                let mut memory = SharedMemory::new(BYTES)?;
                for at in (0..BYTES).step_by(REQUEST) {
                    while asked.load(Ordering::Acquire) <= at {
                        std::hint::spin_loop();
                    }
                    for (i, piece) in content().chunks(PIECE).enumerate() {
                        memory.store((at + i * PIECE) as u64, piece)?;
                    }
                    tell(1).context("cannot tell that a request is done")?;
                }
                anyhow::Ok(())
            };
            write().inspect_err(|_| {
                let _ = tell(BYTES / REQUEST);
            })
        });
        let asker = scope.spawn(|| {
            let ask = || {
                pin(client)?;
                let begin = Instant::now();
                for n in 1..=BYTES / REQUEST {
                    content().chunks_mut(4096).for_each(|block| block[..8].copy_from_slice(&n.to_ne_bytes()));
                    asked.store(n * REQUEST, Ordering::Release);
                    rustix::io::read(&done, &mut [0; 8]).context("cannot wait for a request")?;
                }
                anyhow::Ok(BYTES as f64 / begin.elapsed().as_secs_f64())
            };
            ask().inspect_err(|_| asked.store(BYTES, Ordering::Release))
        });
        let rate = asker.join().map_err(|_| anyhow::anyhow!("the asking thread panicked"))?;
        writer.join().map_err(|_| anyhow::anyhow!("the writing thread panicked"))??;
        rate
    })
}

/// The middle of some figures; 0 when there are none.
pub fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    match figures.len() {
        0 => 0.0,
        n if n % 2 == 1 => figures[n / 2],
        n => (figures[n / 2 - 1] + figures[n / 2]) / 2.0,
    }
}

/// What a figure was measured on.
#[derive(Clone, Debug, Serialize)]
pub struct Hardware {
    /// Processor model.
    pub cpu: String,
    /// Cores that may be used.
    pub cores: usize,
    /// Memory of the machine.
    pub ram_bytes: u64,
    /// Kernel release.
    pub kernel: String,
    /// Where the disk files lay: folder, file system and device.
    pub disk: String,
    /// The setting of transparent huge pages for shared memory.
    pub shmem_huge_pages: String,
}

impl Hardware {
    /// Looks at the machine; `dir` is where disk files will lie.
    pub fn look(dir: &std::path::Path) -> Result<Hardware> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| {
            text.lines()
                .find(|l| l.starts_with(name))
                .and_then(|l| l.split_once(':'))
                .map_or_else(|| "unknown".into(), |(_, v)| v.trim().to_string())
        };
        let memory = field(&read("/proc/meminfo"), "MemTotal");
        let kib: u64 = memory.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
        Ok(Hardware {
            cpu: field(&read("/proc/cpuinfo"), "model name"),
            cores: available()?.len(),
            ram_bytes: kib * 1024,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_string(),
            disk: mount_of(dir).unwrap_or_else(|| dir.display().to_string()),
            shmem_huge_pages: read("/sys/kernel/mm/transparent_hugepage/shmem_enabled").trim().to_string(),
        })
    }
}

/// The mount that a folder lies on, as `ext4 (/dev/vda)`.
fn mount_of(dir: &std::path::Path) -> Option<String> {
    let dir = dir.canonicalize().ok()?;
    let table = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let (_, device, kind) = table
        .lines()
        .filter_map(|l| {
            let mut fields = l.split(' ');
            let (device, at, kind) = (fields.next()?, fields.next()?, fields.next()?);
            dir.starts_with(at).then_some((at.len(), device, kind))
        })
        .max_by_key(|(len, _, _)| *len)?;
    Some(format!("{kind} ({device})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cross_core_time_is_within_reason() {
        let cores = available().unwrap();
        if cores.len() < 2 {
            crate::skip("the cross-core time needs two cores");
            return;
        }
        let ns = cross_core_ns(cores[0], cores[1]).unwrap();
        assert!((5.0..100_000.0).contains(&ns), "{ns}");
    }

    #[test]
    fn medians() {
        assert_eq!(median(&mut []), 0.0);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
