//! The part of Windows above `viostor`: its class driver, which repeats what a bus reset has completed, and users of the disk that
//! check every byte.
//!
//! Owns the choice of commands and the oracle; the driver below owns requests. Invariant: commands under way, or to be repeated,
//! never overlap, so that what a read must return is known.

use super::adapter::{Adapter, Command, Mode};
use super::layout::{PAGE, Scatter};
use crate::load::Rng;
use crate::oracle::Oracle;
use anyhow::{Context, Result, bail, ensure};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

const SECTOR: u64 = 512;
const IO_ERROR: u8 = 1;
/// Until then each command must have been completed, or its disk hangs.
const DEADLINE: Duration = Duration::from_secs(60);
/// In one of so many rounds the write cache is turned on or off.
const CACHE_CHANGES: u64 = 200;
/// Descriptions of mismatches that are kept.
const KEPT: usize = 5;

/// What was done, and what was wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads that were checked.
    pub reads: u64,
    /// Writes without "force unit access".
    pub writes: u64,
    /// Writes with it.
    pub forced_writes: u64,
    /// UNMAPs of a range.
    pub unmaps: u64,
    /// UNMAPs of nothing, which are errors.
    pub empty_unmaps: u64,
    /// Flushes, without those of forced writes.
    pub flushes: u64,
    /// Serial numbers.
    pub serial_numbers: u64,
    /// Changes of the write cache.
    pub cache_changes: u64,
    /// Resets of the device.
    pub resets: u64,
    /// Commands that a reset has completed, and that were sent again.
    pub repeated: u64,
    /// Reads that returned something else than was written.
    pub mismatches: u64,
}

impl Counts {
    /// Requests that the disk has answered, each with the content it should have.
    pub fn requests(&self) -> u64 {
        self.reads
            + self.writes
            + self.forced_writes
            + self.unmaps
            + self.empty_unmaps
            + self.flushes
            + self.serial_numbers
    }
}

struct Flight {
    command: Command,
    since: Instant,
}

/// A Windows that uses a disk.
pub struct Windows {
    adapter: Adapter,
    oracle: Oracle,
    rng: Rng,
    flights: Vec<Option<Flight>>,
    /// To be sent again, or not sent yet, before anything new.
    parked: VecDeque<Command>,
    content: Vec<u8>,
    serial: Option<[u8; 20]>,
    cache: bool,
    counts: Counts,
    wrong: Vec<String>,
}

fn range(command: &Command) -> (u64, u64) {
    match command {
        Command::Read { sector, sectors } | Command::Write { sector, sectors, .. } => {
            (*sector, sector + u64::from(*sectors))
        }
        // One range, by which the disk is asked at most.
        Command::Unmap(ranges) => {
            ranges.first().map_or((0, 0), |&(sector, sectors)| (sector, sector + u64::from(sectors)))
        }
        Command::Synchronize | Command::SerialNumber => (0, 0),
    }
}

impl Windows {
    /// On a disk that holds what the oracle says.
    pub fn new(adapter: Adapter, oracle: Oracle, seed: u64) -> Windows {
        let most = adapter.limits().transfer_bytes as usize;
        Windows {
            flights: Vec::new(),
            parked: VecDeque::new(),
            content: vec![0; most],
            serial: None,
            cache: true,
            counts: Counts::default(),
            wrong: Vec::new(),
            rng: Rng::new(seed),
            adapter,
            oracle,
        }
    }

    /// The driver below.
    pub fn adapter(&mut self) -> &mut Adapter {
        &mut self.adapter
    }

    /// What was done so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The first mismatches, in words.
    pub fn wrong(&self) -> &[String] {
        &self.wrong
    }

    /// Sends commands until so many more have been answered. Others stay under way.
    pub fn run(&mut self, requests: u64) -> Result<()> {
        let enough = self.counts.requests() + requests;
        while self.counts.requests() < enough {
            if self.rng.below(CACHE_CHANGES) == 0 {
                self.cache = !self.cache;
                self.adapter.set_write_cache(self.cache)?;
                self.counts.cache_changes += 1;
            }
            self.submit()?;
            self.answered(DEADLINE)?;
            self.hung()?;
        }
        Ok(())
    }

    /// Sends commands until some have been under way for so long, which they are when the disk stands still. How many.
    pub fn run_into_timeout(&mut self, timeout: Duration) -> Result<usize> {
        loop {
            self.submit()?;
            let overdue = self.flights.iter().flatten().filter(|f| f.since.elapsed() >= timeout).count();
            if overdue > 0 {
                return Ok(overdue);
            }
            let oldest = self.flights.iter().flatten().map(|f| f.since).min();
            let oldest = oldest.context("nothing is under way, and nothing can be sent")?;
            self.answered(timeout.saturating_sub(oldest.elapsed()))?;
        }
    }

    /// Waits for all that is under way, and sends what is parked.
    pub fn drain(&mut self) -> Result<()> {
        while self.adapter.in_flight() > 0 || !self.parked.is_empty() {
            self.submit_parked()?;
            self.answered(DEADLINE)?;
            self.hung()?;
        }
        Ok(())
    }

    /// Resets the device, as StorPort has it done when a command takes too long. What was under way is sent again, with other
    /// content: what the disk would still do of the first attempt would show.
    pub fn reset(&mut self, mode: Mode, while_waiting: impl FnOnce()) -> Result<()> {
        let pending = self.adapter.reset(mode, while_waiting)?;
        self.counts.resets += 1;
        self.counts.repeated += pending.len() as u64;
        for slot in pending.into_iter().rev() {
            let flight = self.flights[slot].take().context("a reset has completed what was not sent")?;
            self.parked.push_front(flight.command);
        }
        ensure!(self.flights.iter().all(Option::is_none), "a reset has left a command");
        Ok(())
    }

    /// Reads the whole disk.
    pub fn verify(&mut self) -> Result<()> {
        self.drain()?;
        let most = self.adapter.limits().transfer_bytes / SECTOR;
        let all = self.adapter.limits().capacity_sectors;
        let pieces = (0..all).step_by(most as usize);
        self.parked =
            pieces.map(|sector| Command::Read { sector, sectors: most.min(all - sector) as u32 }).collect();
        self.drain()
    }

    /// Discards a range of any length, cut as Windows' class driver cuts it: at the limits, whatever the granularity is.
    pub fn retrim(&mut self, sector: u64, sectors: u64) -> Result<()> {
        self.drain()?;
        let (mut at, end) = (sector, sector + sectors);
        while at < end {
            let piece = (end - at).min(u64::from(self.adapter.limits().unmap_sectors));
            self.parked.push_back(Command::Unmap(vec![(at, piece as u32)]));
            at += piece;
        }
        self.drain()
    }

    /// Sends one command that overlaps nothing under way, and waits for it.
    pub fn one(&mut self, command: Command) -> Result<()> {
        self.drain()?;
        self.parked.push_back(command);
        self.drain()
    }

    fn submit(&mut self) -> Result<()> {
        self.submit_parked()?;
        if !self.parked.is_empty() {
            return Ok(());
        }
        while self.adapter.in_flight() < self.adapter.limits().depth {
            // On a busy disk most may be taken: then what is under way goes on first.
            let Some(command) = self.draw_free() else { break };
            if !self.start(command)? {
                break;
            }
        }
        Ok(())
    }

    fn draw_free(&mut self) -> Option<Command> {
        for _ in 0..8 {
            let command = self.draw();
            if self.admits(&command) {
                return Some(command);
            }
        }
        None
    }

    fn submit_parked(&mut self) -> Result<()> {
        while self.adapter.in_flight() < self.adapter.limits().depth {
            let Some(command) = self.parked.pop_front() else { break };
            if !self.start(command)? {
                break;
            }
        }
        Ok(())
    }

    fn admits(&self, command: &Command) -> bool {
        let flying = || self.flights.iter().flatten().map(|f| &f.command);
        if *command == Command::SerialNumber {
            return !flying().any(|c| *c == Command::SerialNumber);
        }
        let (from, to) = range(command);
        !flying().map(range).any(|(other_from, other_to)| from < other_to && other_from < to)
    }

    /// Sends a command. False: no descriptors are left, and it is parked.
    fn start(&mut self, command: Command) -> Result<bool> {
        let mut bytes = 0;
        let lead = match command {
            // Most buffers begin with a page; the adapter asks for a multiple of 4.
            Command::Read { .. } | Command::Write { .. } if self.rng.below(4) == 0 => {
                self.rng.below(1024) * 4
            }
            _ => 0,
        };
        let scatter =
            [Scatter::Pages, Scatter::Pages, Scatter::Runs, Scatter::Whole][self.rng.below(4) as usize];
        if let Command::Write { sector, sectors, .. } = command {
            bytes = sectors as usize * SECTOR as usize;
            self.oracle.write(sector * SECTOR, &mut self.content[..bytes]);
        }
        let cpu = self.rng.below(64) as usize;
        let slot = self.adapter.start_io(cpu, command.clone(), &self.content[..bytes], (scatter, lead))?;
        let Some(slot) = slot else {
            self.parked.push_front(command);
            return Ok(false);
        };
        if self.flights.len() <= slot {
            self.flights.resize_with(slot + 1, || None);
        }
        self.flights[slot] = Some(Flight { command, since: Instant::now() });
        Ok(true)
    }

    fn answered(&mut self, most: Duration) -> Result<()> {
        if self.adapter.in_flight() > 0 {
            self.adapter.wait(most)?;
        }
        while let Some((slot, status)) = self.adapter.completed() {
            let flight = self.flights[slot].take().context("an answer to what was not asked")?;
            let outcome = self.check(slot, &flight.command, status);
            self.adapter.release(slot);
            outcome?;
        }
        Ok(())
    }

    fn check(&mut self, slot: usize, command: &Command, status: u8) -> Result<()> {
        if let Command::Unmap(ranges) = command
            && ranges.is_empty()
        {
            ensure!(status == IO_ERROR, "an UNMAP of nothing has status {status}");
            self.counts.empty_unmaps += 1;
            return Ok(());
        }
        if status != 0 {
            bail!("{command:?} has failed with status {status}");
        }
        match command {
            Command::Read { sector, sectors } => {
                let content = &mut self.content[..*sectors as usize * SECTOR as usize];
                self.adapter.content(slot, content)?;
                self.counts.reads += 1;
                if let Err(error) = self.oracle.check(sector * SECTOR, content) {
                    self.counts.mismatches += 1;
                    if self.wrong.len() < KEPT {
                        self.wrong.push(format!("{command:?}: {error:#}"));
                    }
                }
            }
            Command::Write { fua: false, .. } => self.counts.writes += 1,
            Command::Write { fua: true, .. } => self.counts.forced_writes += 1,
            Command::Unmap(ranges) => {
                self.counts.unmaps += 1;
                for &(sector, sectors) in ranges {
                    self.oracle.discarded(sector * SECTOR, u64::from(sectors) * SECTOR);
                }
            }
            Command::Synchronize => self.counts.flushes += 1,
            Command::SerialNumber => {
                self.counts.serial_numbers += 1;
                let serial = self.adapter.serial_number()?;
                ensure!(*self.serial.get_or_insert(serial) == serial, "the serial number has changed");
                ensure!(serial[0].is_ascii_graphic(), "{serial:?} is no serial number");
            }
        }
        Ok(())
    }

    fn hung(&self) -> Result<()> {
        let oldest = self.flights.iter().flatten().map(|f| f.since.elapsed()).max().unwrap_or_default();
        ensure!(oldest < DEADLINE, "a command has been under way for {oldest:?}");
        Ok(())
    }

    /// Evenly over the exponents: few sectors are as frequent as many.
    fn some_sectors(&mut self, most: u64) -> u64 {
        let sectors = (most as f64).powf(self.rng.below(1 << 20) as f64 / f64::from(1 << 20));
        (sectors as u64 + self.rng.below(2)).clamp(1, most)
    }

    /// A command as Windows sends them: most transfers are a page or a cached view's 64 KiB, some as long as the adapter allows,
    /// few of an odd number of sectors; discards of deleted files; flushes, and writes of the file system's log by "force unit access".
    fn draw(&mut self) -> Command {
        let limits = self.adapter.limits();
        let longest = limits.transfer_bytes / SECTOR;
        let (sectors, aligned) = match self.rng.below(200) {
            0..130 => (PAGE / SECTOR, true),
            130..180 => (self.some_sectors(64), false),
            180..192 => (128, true),
            192..199 => (self.some_sectors(longest), false),
            _ => (longest, true),
        };
        let kind = self.rng.below(1000);
        let sectors = if (900..950).contains(&kind) { self.some_sectors(8192) } else { sectors };
        let step = if aligned { PAGE / SECTOR } else { 1 };
        let sector = self.rng.below((limits.capacity_sectors - sectors) / step + 1) * step;
        let sectors = sectors as u32;
        match kind {
            0..430 => Command::Write { sector, sectors, fua: false },
            430..480 => Command::Write { sector, sectors, fua: true },
            480..900 => Command::Read { sector, sectors },
            900..950 => Command::Unmap(vec![(sector, sectors)]),
            950..990 => Command::Synchronize,
            990..995 => Command::Unmap(Vec::new()),
            _ => Command::SerialNumber,
        }
    }
}
