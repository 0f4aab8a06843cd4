//! What NBD clients are told of the disk's extents: the map first, which says what the guest has written, then the base
//! image, of which a hole or an unused cluster is zero. Owns the questions that wait for the base image's thread.
//!
//! Invariant: zero is said only of what is known to be; each question is answered once, also if the thread finds out
//! nothing, and one of a client that has ended is given up.

use super::reactor::Reactor;
use spillway_core::{Disk, ExtentSource};
use spillway_export::nbd;
use spillway_image::{Extent, ExtentCache, ExtentKind};
use std::collections::VecDeque;

/// The number of the one job at a time that asks for extents alone: none of an operation's.
pub(super) const MAP_JOB: u64 = 1 << 32;

/// A block status request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    /// The client, by its number in tokens.
    client: usize,
    id: nbd::BlockStatusId,
    offset: u64,
    len: u64,
    /// The first extent is enough.
    one: bool,
    /// Its client has ended: nobody waits for the answer.
    given_up: bool,
}

impl Question {
    pub(super) fn new(client: usize, id: nbd::BlockStatusId, offset: u64, len: u64, one: bool) -> Question {
        Question { client, id, offset, len, one, given_up: false }
    }

    /// The byte after the last.
    fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// Those that wait, in the order in which they came. The thread is asked for the first one.
#[derive(Debug, Default)]
pub(super) struct Questions {
    waiting: VecDeque<Question>,
    asked: bool,
}

impl Questions {
    /// Whether somebody waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

/// Extents from a question's first byte on: bytes, and what they are.
type Extents = Vec<(u64, nbd::ExtentKind)>;

/// What is known of the base image.
struct Base<'a> {
    bytes: u64,
    cache: &'a ExtentCache,
    /// What the thread has just answered to this question: what it leaves out is data.
    mapped: Option<&'a [Extent]>,
}

impl Base<'_> {
    /// Of what the bytes from `at` on are, at most `len` of them. `None`: the thread must be asked.
    fn extent(&self, at: u64, len: u64) -> Option<(u64, nbd::ExtentKind)> {
        // The disk's block in which the image ends goes on with zeroes.
        let Some(left) = self.bytes.checked_sub(at).filter(|left| *left > 0) else {
            return Some((len, nbd::ExtentKind::Zero));
        };
        let len = len.min(left);
        let of = |extent: &Extent| (extent.end() - at).min(len);
        let kind = |extent: &Extent| match extent.kind {
            ExtentKind::Zero => nbd::ExtentKind::Zero,
            ExtentKind::Raw { .. } | ExtentKind::Compressed => nbd::ExtentKind::Data,
        };
        if let Some(found) = self.cache.lookup(at) {
            return Some((of(&found), kind(&found)));
        }
        let mapped = self.mapped?;
        match mapped.iter().find(|extent| extent.end() > at) {
            Some(found) if found.offset <= at => Some((of(found), kind(found))),
            Some(next) => Some(((next.offset - at).min(len), nbd::ExtentKind::Data)),
            // Behind the last one it has not looked, unless there is none.
            None if mapped.is_empty() => Some((len, nbd::ExtentKind::Data)),
            None => None,
        }
    }
}

/// The extents that a question asks for, joined, by at most `most` look-ups, and by how many; each may be one at 512
/// entries of the map. An error is the byte from which on the base image's thread must be asked first.
fn known(disk: &Disk, base: &Base<'_>, question: &Question, most: usize) -> Result<(Extents, usize), u64> {
    let (mut at, end) = (question.offset, question.end());
    let mut extents = Extents::new();
    let mut looks = 0;
    while at < end && looks < most {
        looks += 1;
        let (len, source) = disk.extent(at, end);
        let (len, kind) = match source {
            ExtentSource::Zero => (len, nbd::ExtentKind::Zero),
            ExtentSource::Written => (len, nbd::ExtentKind::Data),
            ExtentSource::Base => match base.extent(at, len) {
                Some(found) => found,
                None if !extents.is_empty() => break,
                None if base.mapped.is_some() => (len, nbd::ExtentKind::Data),
                None => return Err(at),
            },
        };
        match extents.last_mut() {
            Some((last, same)) if *same == kind => *last += len,
            Some(_) if question.one => break,
            _ => extents.push((len, kind)),
        }
        at += len;
    }
    Ok((extents, looks))
}

impl Reactor {
    /// Answers a question if that is possible at once, else it waits. `looks_left` is what the turn may still look up,
    /// beside one look for each client.
    pub(super) fn take_block_status(&mut self, question: Question, looks_left: &mut usize) {
        if self.answer(question, looks_left, None).is_err() {
            self.questions.waiting.push_back(question);
        }
    }

    /// Answers the question that the thread was asked for, once it has answered, and goes on with the next ones. True:
    /// there may be more to do.
    pub(super) fn answer_block_status(&mut self) -> bool {
        let mapped = self.io.base.take_mapped();
        if self.questions.is_empty() || (self.questions.asked && mapped.is_none()) {
            return false;
        }
        let mut looks_left = nbd::MAX_EXTENTS;
        if let Some(mapped) = mapped {
            self.questions.asked = false;
            self.answer_first(&mut looks_left, &mapped);
        }
        while looks_left > 0
            && !self.questions.asked
            && let Some(&question) = self.questions.waiting.front()
        {
            match self.answer(question, &mut looks_left, None) {
                Ok(()) => _ = self.questions.waiting.pop_front(),
                Err(from) => {
                    self.questions.asked = self.io.base.map(from, question.end() - from);
                    if !self.questions.asked {
                        self.answer_first(&mut looks_left, &[]);
                    }
                }
            }
        }
        true
    }

    fn answer_first(&mut self, looks_left: &mut usize, mapped: &[Extent]) {
        if let Some(question) = self.questions.waiting.pop_front() {
            let answered = self.answer(question, looks_left, Some(mapped));
            debug_assert!(answered.is_ok(), "what the thread does not know is data");
        }
    }

    fn base<'a>(&'a self, mapped: Option<&'a [Extent]>) -> Base<'a> {
        Base { bytes: self.start.base_bytes, cache: self.io.base.extents(), mapped }
    }

    /// An error is the byte from which on the base image's thread must be asked first.
    fn answer(
        &mut self,
        question: Question,
        looks_left: &mut usize,
        mapped: Option<&[Extent]>,
    ) -> Result<(), u64> {
        if question.given_up {
            return Ok(());
        }
        let most = (*looks_left).max(1);
        let (extents, looks) = known(&self.disk, &self.base(mapped), &question, most)?;
        *looks_left = looks_left.saturating_sub(looks);
        let client = self.io.clients.nbd[question.client].as_mut();
        let client = client.expect("a client stays while its requests are unfinished");
        client.connection.answer_block_status(question.id, extents.into_iter());
        (client.active, client.touched) = (true, true);
        Ok(())
    }

    /// A client has ended: its questions are given up.
    pub(super) fn give_up_questions(&mut self, n: usize) {
        for question in &mut self.questions.waiting {
            if question.client != n || question.given_up {
                continue;
            }
            question.given_up = true;
            let client = self.io.clients.nbd[n].as_mut();
            let client = client.expect("a client stays while its requests are unfinished");
            client.connection.answer_block_status(question.id, std::iter::empty());
        }
    }
}
