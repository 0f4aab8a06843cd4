//! Requests that may go on, and requests that wait behind another one, by row.
//!
//! Invariants: a row is on one of these lists at most; a row that leaves the table is on none. So the memory that this
//! takes is bounded by the most requests that were unfinished at a time.

use crate::lists::{Lists, Node};
use crate::table::Id;

/// The list of those that may go on.
const RUNNABLE: Node = 0;

/// The node of a row as a member of a list.
fn member(id: Id) -> Node {
    2 * id + 1
}

/// The head of the list of those that wait behind this row.
fn behind(id: Id) -> Node {
    2 * id + 2
}

pub(crate) struct RunQueue {
    /// Has nodes for all rows up to the last one that was ever on a list, or had one.
    lists: Lists,
}

impl RunQueue {
    pub fn new() -> RunQueue {
        RunQueue { lists: Lists::new(1) }
    }

    /// Whether no request may go on.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.lists.is_alone(RUNNABLE)
    }

    /// The first request that may go on.
    pub fn first(&self) -> Option<Id> {
        (!self.is_empty()).then(|| (self.lists.next(RUNNABLE) - 1) / 2)
    }

    fn add_nodes(&mut self, id: Id) {
        self.lists.grow(behind(id) + 1);
    }

    /// The request may go on, after all others that may.
    pub fn push(&mut self, id: Id) {
        self.add_nodes(id);
        self.lists.push_back(RUNNABLE, member(id));
    }

    /// Lets the request wait until the row `blocker` is removed.
    pub fn wait_behind(&mut self, id: Id, blocker: Id) {
        self.add_nodes(id.max(blocker));
        self.lists.push_back(behind(blocker), member(id));
    }

    /// Takes the request off its list, if it is on one.
    pub fn unlink(&mut self, id: Id) {
        if member(id) < self.lists.len() {
            self.lists.unlink(member(id));
        }
    }

    /// The row leaves the table: those that wait behind it may go on.
    #[inline]
    pub fn remove(&mut self, id: Id) {
        if member(id) < self.lists.len() {
            self.lists.unlink(member(id));
            self.lists.append(RUNNABLE, behind(id));
        }
    }

    /// All rows that are on a list; for the self-check.
    pub fn members(&self) -> impl Iterator<Item = Id> {
        let heads = (RUNNABLE..self.lists.len()).step_by(2);
        heads.flat_map(|head| self.lists.iter(head)).map(|node| (node - 1) / 2)
    }
}
