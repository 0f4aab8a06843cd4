//! The general path from a head to a request: chains and tables of any shape (virtio 2.7.4, 2.7.5). Owns the scratch
//! memory for one chain; never decides what a request means.
//!
//! Invariant: each descriptor is copied once, before anything is concluded from it, and no walk takes more
//! steps than its table has entries.

use super::budget::Budget;
use super::config::{Device, SERIAL_BYTES};
use super::error::Error;
use super::memory::{Memory, Segment, copy_from_guest, copy_to_guest};
use super::queue::{ChainOutcome, Queue};
use super::request::{HEADER_BYTES, Kind, RANGE_BYTES, RequestHeader, Status, range, transfer};
use super::ring::{DESCRIPTOR_BYTES, Descriptor, F_INDIRECT, F_NEXT, F_WRITE};
use crate::ErrorKind;

/// Most entries of an indirect table. Linux makes tables longer than its queue (254 segments in a queue of
/// 128), so the queue's size is not the bound.
const MAX_TABLE: u32 = 1024;

/// Memory for one chain, used again for the next.
#[derive(Default)]
pub(super) struct Scratch {
    /// Device-readable buffers, then device-writable ones; none of them empty.
    buffers: Vec<Descriptor>,
    readable: usize,
    table: Vec<u8>,
    segments: Vec<Segment>,
}

/// Takes the chain of `head` apart. A request that cannot be carried out is answered at once; a chain that cannot even
/// be answered stops the queue.
#[cold]
#[inline(never)]
pub(super) fn take(
    queue: &mut Queue,
    head: u16,
    memory: &Memory,
    device: &Device,
    budget: &mut Budget,
    scratch: &mut Scratch,
) -> ChainOutcome {
    match read(queue, head, memory, device, budget, scratch) {
        Ok(outcome) => outcome,
        Err(error) => {
            // Memory that has shrunk reads as zeroes: what they seem to say is nobody's fault.
            if !memory.guard().poisoned() {
                queue.break_down(error.at_head(head));
            }
            ChainOutcome::Stopped
        }
    }
}

fn read(
    queue: &mut Queue,
    head: u16,
    memory: &Memory,
    device: &Device,
    budget: &mut Budget,
    scratch: &mut Scratch,
) -> Result<ChainOutcome, Error> {
    scratch.collect(queue, head, memory)?;
    let status = scratch.split_status(queue, memory)?;
    let answer = |queue: &mut Queue, status_byte, written| {
        queue.answer(head, status, status_byte, written);
        Ok(ChainOutcome::Answered)
    };
    // Bytes before the status byte, if there are any, stay as they are in an answer that failed.
    let (readable, writable) = scratch.lengths();
    let failed_bytes = u32::from(writable == 0);

    let Some(header) = scratch.split_header(queue, memory) else {
        return answer(queue, Status::IoError, failed_bytes);
    };
    let header = RequestHeader::parse(&header);
    let out_bytes = readable - HEADER_BYTES as u64;
    let Some(kind) = header.kind else { return answer(queue, Status::Unsupported, failed_bytes) };
    let submission = match kind {
        Kind::In => transfer(device, false, header.sector, writable).ok_or(Status::IoError),
        Kind::Out => transfer(device, true, header.sector, out_bytes).ok_or(Status::IoError),
        Kind::Flush => Ok(super::request::Submission {
            operation: spillway_core::Operation::Flush,
            sector: 0,
            sectors: 0,
        }),
        Kind::GetId => {
            return match scratch.write_id(queue, memory, &device.serial) {
                Some(written) => answer(queue, Status::Ok, written),
                None => answer(queue, Status::IoError, failed_bytes),
            };
        }
        Kind::Discard | Kind::WriteZeroes => match scratch.read_range(queue, memory, out_bytes) {
            Some(bytes) => range(device, kind == Kind::WriteZeroes, &bytes),
            None => Err(Status::IoError),
        },
    };
    let submission = match submission {
        Ok(submission) => submission,
        Err(status) => return answer(queue, status, failed_bytes),
    };
    let buffers = match kind {
        Kind::In => &scratch.buffers[scratch.readable..],
        Kind::Out => &scratch.buffers[..scratch.readable],
        _ => &[],
    };
    scratch.segments.clear();
    for buffer in buffers {
        if !memory.segments(&mut queue.hints.data, buffer.address, buffer.len, &mut scratch.segments) {
            return answer(queue, Status::IoError, failed_bytes);
        }
    }
    let used_bytes = if kind == Kind::In { writable as u32 + 1 } else { failed_bytes };
    queue.set_head(head, status, used_bytes, &scratch.segments, budget);
    Ok(ChainOutcome::Submit(submission))
}

impl Scratch {
    /// Copies all descriptors of a chain (2.7.5, 2.7.5.3).
    fn collect(&mut self, queue: &mut Queue, head: u16, memory: &Memory) -> Result<(), Error> {
        let no_ring =
            || Error::new(ErrorKind::NoMemoryRegion, "it lies in no memory region any more").of("ring");
        let ring = queue.ring.ok_or_else(no_ring)?;
        self.buffers.clear();
        self.readable = 0;
        let mut index = head;
        for _ in 0..ring.size() {
            let descriptor = ring.descriptor(index);
            if descriptor.flags & F_INDIRECT != 0 {
                if !queue.features.indirect {
                    let reason = "an indirect descriptor was not negotiated (virtio 2.7.5.3.1)";
                    return Err(Error::new(ErrorKind::NotNegotiated, reason).at_descriptor(index));
                }
                if descriptor.flags & F_NEXT != 0 {
                    let reason = "a descriptor is indirect and has a next one (virtio 2.7.5.3.1)";
                    return Err(Error::protocol(reason).at_descriptor(index));
                }
                return self.collect_table(queue, &descriptor, memory);
            }
            self.push(index, descriptor)?;
            if descriptor.flags & F_NEXT == 0 {
                return Ok(());
            }
            if descriptor.next >= ring.size() {
                let reason = "the next descriptor lies beyond the table (virtio 2.7.5)";
                return Err(out_of_bounds(reason, index, descriptor.next, ring.size()));
            }
            index = descriptor.next;
        }
        Err(Error::protocol("the chain is longer than its queue: it is a loop (virtio 2.7.5.1)"))
    }

    fn collect_table(&mut self, queue: &mut Queue, table: &Descriptor, memory: &Memory) -> Result<(), Error> {
        let of_table = |error: Error| error.of("indirect table").at(table.address, u64::from(table.len));
        let entries = table.len / DESCRIPTOR_BYTES;
        if entries == 0 || entries > MAX_TABLE || !table.len.is_multiple_of(DESCRIPTOR_BYTES) {
            let reason = "it has no, too many or incomplete descriptors (virtio 2.7.5.3)";
            return Err(of_table(Error::protocol(reason)));
        }
        self.table.resize(table.len as usize, 0);
        if !copy_out(memory, &mut queue.hints.table, table.address, &mut self.table, &mut self.segments) {
            let reason = "it lies outside guest memory";
            return Err(of_table(Error::new(ErrorKind::NoMemoryRegion, reason)));
        }
        // At most `MAX_TABLE`.
        let entries = entries as u16;
        let mut index = 0u16;
        for _ in 0..entries {
            let at = usize::from(index) * DESCRIPTOR_BYTES as usize;
            let word =
                |at: usize| u64::from_ne_bytes(self.table[at..at + 8].try_into().expect("eight bytes"));
            let descriptor = Descriptor::from_words(word(at), word(at + 8));
            if descriptor.flags & F_INDIRECT != 0 {
                let reason = "an indirect table is inside an indirect table (virtio 2.7.5.3.1)";
                return Err(of_table(Error::protocol(reason).at_descriptor(index)));
            }
            self.push(index, descriptor).map_err(of_table)?;
            if descriptor.flags & F_NEXT == 0 {
                return Ok(());
            }
            if descriptor.next >= entries {
                let reason = "the next descriptor lies beyond the indirect table (virtio 2.7.5.3)";
                return Err(of_table(out_of_bounds(reason, index, descriptor.next, entries)));
            }
            index = descriptor.next;
        }
        Err(of_table(Error::protocol("the chain in it is a loop (virtio 2.7.5.1)")))
    }

    fn push(&mut self, index: u16, descriptor: Descriptor) -> Result<(), Error> {
        let writable = descriptor.flags & F_WRITE != 0;
        if !writable && self.buffers.len() != self.readable {
            let reason = "a readable buffer comes after a writable one (virtio 2.7.4.2)";
            return Err(Error::protocol(reason).at_descriptor(index));
        }
        if descriptor.len > 0 {
            self.buffers.push(descriptor);
            self.readable += usize::from(!writable);
        }
        Ok(())
    }

    /// Bytes to read, and bytes to write.
    fn lengths(&self) -> (u64, u64) {
        let sum = |buffers: &[Descriptor]| buffers.iter().map(|b| u64::from(b.len)).sum();
        (sum(&self.buffers[..self.readable]), sum(&self.buffers[self.readable..]))
    }

    /// Takes the last writable byte: the status (5.2.6). The framing is the driver's choice (2.7.4).
    fn split_status(&mut self, queue: &mut Queue, memory: &Memory) -> Result<*mut u8, Error> {
        let writable = &mut self.buffers[self.readable..];
        let no_status = || Error::protocol("there is no writable buffer for the status byte (virtio 5.2.6)");
        let last = writable.last_mut().ok_or_else(no_status)?;
        last.len -= 1;
        let (start, before) = (last.address, u64::from(last.len));
        let address = start.checked_add(before);
        let at = address.and_then(|address| memory.translate(&mut queue.hints.status, address, 1));
        if last.len == 0 {
            self.buffers.pop();
        }
        at.ok_or_else(|| {
            Error::new(ErrorKind::NoMemoryRegion, "it lies outside guest memory")
                .of("status byte")
                .at(start.wrapping_add(before), 1)
        })
    }

    /// Takes the first 16 readable bytes.
    fn split_header(&mut self, queue: &mut Queue, memory: &Memory) -> Option<[u8; HEADER_BYTES]> {
        let mut header = [0; HEADER_BYTES];
        self.take_front(queue, memory, &mut header).then_some(header)
    }

    /// The one range of a discard or write-zeroes. More than one was not offered (`max_discard_seg`).
    fn read_range(&mut self, queue: &mut Queue, memory: &Memory, bytes: u64) -> Option<[u8; RANGE_BYTES]> {
        let mut range = [0; RANGE_BYTES];
        (bytes == RANGE_BYTES as u64 && self.take_front(queue, memory, &mut range)).then_some(range)
    }

    /// Copies and takes off the first readable bytes, however they are cut in buffers.
    fn take_front(&mut self, queue: &mut Queue, memory: &Memory, to: &mut [u8]) -> bool {
        let mut filled = 0;
        let mut used_up = 0;
        for buffer in &mut self.buffers[..self.readable] {
            let len = (to.len() - filled).min(buffer.len as usize);
            let piece = &mut to[filled..filled + len];
            if !copy_out(memory, &mut queue.hints.header, buffer.address, piece, &mut self.segments) {
                return false;
            }
            filled += len;
            buffer.len -= len as u32;
            buffer.address = buffer.address.wrapping_add(len as u64);
            if buffer.len > 0 {
                break;
            }
            used_up += 1;
        }
        self.buffers.drain(..used_up);
        self.readable -= used_up;
        filled == to.len()
    }

    /// GET_ID: fills the writable bytes with the serial number, as many as there are. How many were written,
    /// with the status byte when it comes right after them.
    fn write_id(&mut self, queue: &mut Queue, memory: &Memory, id: &[u8; SERIAL_BYTES]) -> Option<u32> {
        let mut unwritten = &id[..];
        let mut rest = 0;
        for buffer in &self.buffers[self.readable..] {
            let (piece, later) = unwritten.split_at(unwritten.len().min(buffer.len as usize));
            self.segments.clear();
            let len = piece.len() as u32;
            if !memory.segments(&mut queue.hints.data, buffer.address, len, &mut self.segments) {
                return None;
            }
            let mut from = piece;
            for segment in &self.segments {
                let (now, then) = from.split_at(segment.len as usize);
                // SAFETY: a segment of guest memory that was translated just now.
                unsafe { copy_to_guest(now, segment.at) };
                from = then;
            }
            rest += u64::from(buffer.len - len);
            unwritten = later;
        }
        Some((SERIAL_BYTES - unwritten.len()) as u32 + u32::from(rest == 0))
    }
}

fn out_of_bounds(reason: &'static str, index: u16, next: u16, entries: u16) -> Error {
    Error::new(ErrorKind::OutOfBounds, reason).at_descriptor(index).above(next, entries - 1)
}

/// Copies guest memory that may lie in several regions.
fn copy_out(
    memory: &Memory,
    hint: &mut super::memory::Hint,
    address: u64,
    to: &mut [u8],
    segments: &mut Vec<Segment>,
) -> bool {
    segments.clear();
    if !memory.segments(hint, address, to.len() as u32, segments) {
        return false;
    }
    let mut to = to;
    for segment in segments.iter() {
        let (now, then) = to.split_at_mut(segment.len as usize);
        // SAFETY: a segment of guest memory that was translated just now.
        unsafe { copy_from_guest(segment.at, now) };
        to = then;
    }
    true
}
