//! What a proxy counts. Owns the counters and their snapshot.
//!
//! Invariant: each request is counted once by its method when it arrives, and once by its status, as unanswered or as in flight.

use super::model::StoreFault;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// Figures since the proxy was started or its figures were cleared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreFigures {
    /// Requests by their method.
    pub requests: BTreeMap<String, u64>,
    /// Answers by their status.
    pub statuses: BTreeMap<u16, u64>,
    /// Requests that got no status: connections that were reset, and clients that went before.
    pub unanswered: u64,
    /// Requests that have no status yet.
    pub in_flight: u64,
    /// Requests that the store itself did not answer, which the proxy answers with 502.
    pub store_failures: u64,
    /// Bytes of the bodies of requests.
    pub received_bytes: u64,
    /// Bytes of the bodies of answers.
    pub sent_bytes: u64,
    /// Different objects that were asked for with GET.
    pub objects: u64,
    /// Most GETs for one object.
    pub most_gets: u64,
    /// GETs for each object, by its path. Requests with a query, such as lists, are of no object.
    pub gets: BTreeMap<String, u64>,
    /// Faults that were injected.
    pub faults: BTreeMap<StoreFault, u64>,
}

impl StoreFigures {
    /// All requests.
    pub fn total_requests(&self) -> u64 {
        self.requests.values().sum()
    }

    /// All faults that were injected.
    pub fn total_faults(&self) -> u64 {
        self.faults.values().sum()
    }
}

/// The counters.
#[derive(Default)]
pub struct Counters {
    counted: Mutex<Counted>,
}

#[derive(Default)]
struct Counted {
    figures: StoreFigures,
    /// How often each method and address was asked for, since the start.
    asked: BTreeMap<String, u64>,
    /// How often the figures were cleared: what arrived before is not counted after.
    era: u64,
}

/// A request that was counted when it arrived. One that is dropped without a status counts as unanswered.
pub struct Arrival<'a> {
    counters: &'a Counters,
    era: u64,
    has_status: bool,
    /// How often the same method and address was asked for before.
    pub nth: u64,
}

impl Counters {
    fn counted(&self) -> MutexGuard<'_, Counted> {
        self.counted.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Counts a request that has arrived.
    pub fn arrive(&self, method: &str, address: &str) -> Arrival<'_> {
        let counted = &mut *self.counted();
        let asked = counted.asked.entry(format!("{method} {address}")).or_default();
        let nth = *asked;
        *asked += 1;
        let figures = &mut counted.figures;
        *figures.requests.entry(method.to_owned()).or_default() += 1;
        figures.in_flight += 1;
        if method == "GET" && !address.contains('?') {
            let gets = figures.gets.entry(address.to_owned()).or_default();
            *gets += 1;
            figures.most_gets = figures.most_gets.max(*gets);
            figures.objects = figures.gets.len() as u64;
        }
        Arrival { counters: self, era: counted.era, has_status: false, nth }
    }

    /// Counts bytes of the body of a request.
    pub fn receive(&self, bytes: usize) {
        self.counted().figures.received_bytes += bytes as u64;
    }

    /// Counts bytes of the body of an answer.
    pub fn send(&self, bytes: usize) {
        self.counted().figures.sent_bytes += bytes as u64;
    }

    /// Counts a fault that was injected.
    pub fn inject(&self, fault: StoreFault) {
        *self.counted().figures.faults.entry(fault).or_default() += 1;
    }

    /// Counts a request that the store did not answer.
    pub fn fail(&self) {
        self.counted().figures.store_failures += 1;
    }

    /// The figures as they are now.
    pub fn figures(&self) -> StoreFigures {
        self.counted().figures.clone()
    }

    /// Begins all figures at 0. Requests that are in flight are not counted any more.
    pub fn clear(&self) {
        let counted = &mut *self.counted();
        counted.figures = StoreFigures::default();
        counted.era += 1;
    }
}

impl Arrival<'_> {
    /// Counts its status.
    pub fn answer(&mut self, status: u16) {
        self.has_status = true;
        let counted = &mut *self.counters.counted();
        if counted.era == self.era {
            counted.figures.in_flight -= 1;
            *counted.figures.statuses.entry(status).or_default() += 1;
        }
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        let counted = &mut *self.counters.counted();
        if !self.has_status && counted.era == self.era {
            counted.figures.in_flight -= 1;
            counted.figures.unanswered += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_is_counted_by_what_became_of_it() {
        let counters = Counters::default();
        let mut answered = counters.arrive("GET", "/a");
        answered.answer(200);
        drop(answered);
        drop(counters.arrive("GET", "/a"));
        let late = counters.arrive("PUT", "/b?x");
        assert_eq!(counters.arrive("GET", "/a").nth, 2);
        let figures = counters.figures();
        assert_eq!((figures.total_requests(), figures.in_flight, figures.unanswered), (4, 1, 2));
        assert_eq!((figures.objects, figures.most_gets, figures.statuses[&200]), (1, 3, 1));
        counters.clear();
        drop(late);
        assert_eq!(counters.figures(), StoreFigures::default());
        assert_eq!(counters.arrive("GET", "/a").nth, 3, "choices go on");
    }
}
