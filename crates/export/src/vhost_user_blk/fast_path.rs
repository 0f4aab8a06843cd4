//! The fast path from a head to a request, which nearly all requests take: header, one piece of data in one region,
//! status, as a chain of three or as a table of three. Owns nothing; a chain of any other shape is left as it was to
//! [`super::chain`], which reads it again from the start.
//!
//! Invariant: each descriptor is copied once, and nothing is concluded from guest memory that was not copied.

use super::config::Device;
use super::memory::{Memory, Segment, read_16};
use super::queue::Queue;
use super::request::{HEADER_BYTES, Kind, RequestHeader, Submission, transfer};
use super::ring::{DESCRIPTOR_BYTES, Descriptor, F_INDIRECT, F_NEXT, F_WRITE, prefetch};

/// Takes a head of the usual shape and fills in its state. `None`: it has another shape.
#[inline(always)]
pub(super) fn take(queue: &mut Queue, head: u16, memory: &Memory, device: &Device) -> Option<Submission> {
    let ring = queue.ring.as_ref()?;
    let d0 = ring.descriptor(head);
    let (header, data, status);
    if d0.flags == F_INDIRECT && d0.len == 3 * DESCRIPTOR_BYTES && queue.features.indirect {
        let table = memory.translate(&mut queue.hints.table, d0.address, d0.len)?;
        if !(table as usize).is_multiple_of(8) {
            return None;
        }
        let word = |at| {
            // SAFETY: 48 bytes of guest memory from `table` on, aligned to 8; volatile, so read once.
            unsafe { table.cast::<u64>().add(at).read_volatile() }
        };
        header = Descriptor::from_words(word(0), word(1));
        data = Descriptor::from_words(word(2), word(3));
        status = Descriptor::from_words(word(4), word(5));
        if header.next != 1 || data.next != 2 {
            return None;
        }
    } else {
        header = d0;
        if header.flags != F_NEXT || header.next >= ring.size() {
            return None;
        }
        data = ring.descriptor(header.next);
        if data.flags & F_NEXT == 0 || data.next >= ring.size() {
            return None;
        }
        status = ring.descriptor(data.next);
    }
    let write = data.flags == F_NEXT;
    if header.flags != F_NEXT
        || header.len != HEADER_BYTES as u32
        || !(write || data.flags == F_NEXT | F_WRITE)
        || status.flags != F_WRITE
        || status.len != 1
    {
        return None;
    }
    let header_at = memory.translate(&mut queue.hints.header, header.address, header.len)?;
    let data_at = memory.translate(&mut queue.hints.data, data.address, data.len)?;
    let status_at = memory.translate(&mut queue.hints.status, status.address, 1)?;
    prefetch(data_at);
    // SAFETY: 16 bytes of guest memory from `header_at` on.
    let header = RequestHeader::parse(&unsafe { read_16(header_at) });
    match header.kind {
        Some(Kind::In) if !write => {}
        Some(Kind::Out) if write => {}
        _ => return None,
    }
    let submission = transfer(device, write, header.sector, u64::from(data.len))?;
    let state = &mut queue.heads[usize::from(head)];
    state.status = status_at;
    state.first = Segment { at: data_at, len: data.len };
    state.used_bytes = if write { 1 } else { data.len + 1 };
    Some(submission)
}
