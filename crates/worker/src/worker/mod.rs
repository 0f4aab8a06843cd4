//! The worker: the process that serves one disk. One thread, which owns everything.
//!
//! `engine` does I/O without waiting, by `uring` or by `threads`; `staging` owns the buffers that asynchronous I/O uses, the only memory it ever
//! targets; `memory` maps what the supervisor made; `io` does what the core asks, with files by `transfers`, held back by `models`; `clients` holds the
//! connections; `error` is why something failed; `block_status` tells NBD clients what is zero; `sandbox` gives up what is not needed; `reactor` is the loop, `watches` what wakes it, `supervision` its talk with the supervisor.

mod attach;
mod barrier;
mod base_reads;
mod block_status;
mod calibrate;
mod clients;
mod engine;
mod error;
mod events;
mod io;
mod memory;
mod models;
mod polls;
mod rate;
mod reactor;
pub mod sandbox;
mod slots;
mod spin;
mod staging;
mod supervision;
mod tap;
mod threads;
mod transfers;
mod uring;
mod watches;

use crate::channel::{self, FromWorker, Start, ToWorker};
pub use engine::Kind;
use error::Error;
pub use error::{ErrorKind, ReportedError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spillway_export::Figures;
use std::os::fd::{AsFd, OwnedFd};

/// Whether the I/O of files can be done by io_uring here; if not, why.
pub fn io_uring_is_usable() -> Result<(), ReportedError> {
    engine::probe_uring().map_err(|error| error.report())
}

/// Serves the disk that the supervisor describes on `channel`, until it says stop. Returns the exit code that this process
/// is to end with at once: its memory stays mapped.
pub fn main(channel: OwnedFd) -> i32 {
    // What `ps` and `top` show; a name cannot fail to be set.
    let _ = rustix::thread::set_name(c"spillway-worker");
    die_of_panics();
    take_precedence();
    let served = start(&channel).and_then(|mut reactor| {
        let served = reactor.run();
        // The kernel takes the memory apart after it has told of the end (`lifeline`): nobody waits for that.
        std::mem::forget(reactor);
        served
    });
    match served {
        Ok(()) => 0,
        Err(error) => {
            // If nobody listens any more there is nobody to tell.
            let _ = channel::send(channel.as_fd(), &FromWorker::Failed { error: error.report() }, &[]);
            eprintln!("spillway worker: {error}");
            1
        }
    }
}

/// How much nicer the worker is to others than the supervisor: less, so that on a busy host it has three quarters of a core
/// that a guest computes on, not half. Whoever computes there waits for this disk sooner or later.
const NICE: i32 = -5;

/// Goes before what computes, where this user may ask for that; elsewhere it shares the processors evenly.
fn take_precedence() {
    let _ = rustix::process::nice(NICE);
}

/// A panic in any thread ends the process, also in builds that unwind: else nobody would do what that thread had to do,
/// and whoever waits for it would wait for ever. The next worker goes on.
fn die_of_panics() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        // Should nobody read what is said, it is not said.
        let stderr = std::io::stderr();
        let mut room = [PollFd::new(&stderr, PollFlags::OUT)];
        if poll(&mut room, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1) {
            tell(panic);
        }
        std::process::abort();
    }));
}

fn start(channel: &OwnedFd) -> Result<reactor::Reactor, Error> {
    let hello = FromWorker::Hello {
        protocol: channel::PROTOCOL_VERSION,
        layout: spillway_core::LAYOUT_VERSION,
        version: env!("CARGO_PKG_VERSION").into(),
    };
    let failed = |reason| Error::new(ErrorKind::Channel, reason);
    channel::send(channel, &hello, &[])
        .map_err(|e| failed("the supervisor cannot be told that the worker is there").because(e))?;
    let (message, fds) = channel::receive::<ToWorker>(channel)
        .map_err(|e| failed("the supervisor's first message cannot be read").because(e))?
        .ok_or_else(|| failed("the supervisor has gone before it said what to serve"))?;
    let ToWorker::Start(start) = message else {
        return Err(failed("the supervisor's first message is not `start`"));
    };
    let own = channel.try_clone().map_err(cannot_duplicate)?;
    let mut notices = Vec::new();
    let engine = engine::Engine::new(&mut notices)?;
    let kind = engine.kind();
    let landlock = sandbox::drop_rights(&mut notices);
    let mut fds = Fds::sort(&start, fds)?;
    if let Some(shared) = fds.lifeline.take()
        && let Err(e) = crate::lifeline::hold(shared)
    {
        notices.push(format!("the next worker would start late: this kernel has no robust futexes ({e})"));
    }
    let reactor = reactor::Reactor::new(own, &start, fds, engine)?;
    sandbox::filter_calls(kind, &mut notices);
    for text in notices {
        // Nobody who listens: that is found out by `ready`.
        let _ = channel::send(channel, &FromWorker::Event { kind: "notice".into(), text }, &[]);
    }
    channel::send(channel, &FromWorker::Ready { engine: kind.name().into(), landlock }, &[])
        .map_err(|e| failed("the supervisor cannot be told that the worker is ready").because(e))?;
    Ok(reactor)
}

/// The host gives no second file descriptor for an open file.
fn cannot_duplicate(source: std::io::Error) -> Error {
    Error::new(ErrorKind::Resources, "a file descriptor cannot be duplicated")
        .because(source)
        .advice("see that file descriptors are left (ulimit -n)")
}

/// The fds of `Start`, by name.
struct Fds {
    meta: OwnedFd,
    base: OwnedFd,
    digests: Option<OwnedFd>,
    residency: Option<OwnedFd>,
    data: Option<OwnedFd>,
    file: Option<OwnedFd>,
    base_model: Option<OwnedFd>,
    overflow_model: Option<OwnedFd>,
    lifeline: Option<OwnedFd>,
    /// pidfds.
    predecessors: Vec<OwnedFd>,
}

impl Fds {
    fn sort(start: &Start, fds: Vec<OwnedFd>) -> Result<Fds, Error> {
        let mode = start.settings.mode();
        let predecessors = usize::from(start.predecessors);
        let is_streamed = start.chunk_bytes.is_some();
        let of_base = [start.digests, is_streamed, start.base_model];
        let own = of_base.into_iter().chain([mode.has_ram(), mode.has_file(), start.overflow_model]);
        let want = 3 + own.map(usize::from).sum::<usize>() + predecessors;
        let got = fds.len();
        let mut fds = fds.into_iter();
        let unequal = || {
            Error::new(ErrorKind::Channel, "another number of file descriptors came than the message names")
                .of("the supervisor's message `start`")
                .figures(Figures::Unequal { found: got as u64, expected: want as u64 })
        };
        let mut next = || fds.next().ok_or_else(unequal);
        let sorted = Fds {
            meta: next()?,
            base: next()?,
            digests: start.digests.then(&mut next).transpose()?,
            residency: is_streamed.then(&mut next).transpose()?,
            data: mode.has_ram().then(&mut next).transpose()?,
            file: mode.has_file().then(&mut next).transpose()?,
            base_model: start.base_model.then(&mut next).transpose()?,
            overflow_model: start.overflow_model.then(&mut next).transpose()?,
            lifeline: Some(next()?),
            predecessors: (0..predecessors).map(|_| next()).collect::<Result<_, _>>()?,
        };
        if got != want {
            return Err(unequal());
        }
        Ok(sorted)
    }
}

/// Time by a clock that nobody sets.
#[inline]
fn now_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
