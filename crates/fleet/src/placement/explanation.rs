//! Why machines are not placed, for people and for the API. Owns the reasons and their words.
//!
//! Invariant: an explanation is bounded, however many hosts there are.

use super::space::{Resource, Shortage};
use crate::records::HostRecord;
use serde::Serialize;
use spillway_api::{FleetSettings, Name};
use std::fmt;

/// Most hosts that an explanation names.
pub const MOST_EXPLAINED: usize = 20;

/// Machines of a catalog that no host gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unplaced {
    /// The catalog.
    pub catalog: Name,
    /// Number of machines.
    pub machines: u64,
    /// Why no host gets them.
    pub why: Why,
}

/// Why no host gets a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    /// Each host has its own reason.
    Hosts {
        /// The first hosts, in the order of their names.
        hosts: Vec<(Name, Obstacle)>,
        /// Number of further hosts.
        more: usize,
    },
}

/// Why a host gets no further machine of a catalog.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Obstacle {
    /// It has no lease, or no record that can be read, or is declared dead.
    NotAlive,
    /// It is draining.
    Draining,
    /// It is cordoned.
    Cordoned,
    /// It is in none of the catalog's zones.
    OtherZone,
    /// It has no such label, or one of another value.
    LacksLabel(Name),
    /// It has not reported its budget yet.
    NoStatus,
    /// The record of its share cannot be read, or that of a machine with a name of the fleet.
    Unreadable,
    /// It has refused the catalog, and is passed over for so many milliseconds.
    Refused {
        /// Milliseconds until it is asked again.
        wait_ms: u64,
    },
    /// Its share was just written.
    JustWritten,
    /// The catalog's naming has names for so many machines on it, and it has them.
    Names(u32),
    /// It has not enough of a resource.
    Lacks(Shortage),
}

impl Obstacle {
    /// What of a host's record is not as a catalog wants it.
    pub(super) fn of_settings(record: &HostRecord, settings: &FleetSettings) -> Option<Obstacle> {
        if !settings.zones.is_empty() && !settings.zones.contains(&record.zone) {
            return Some(Obstacle::OtherZone);
        }
        let lacked =
            settings.host_labels.iter().find(|(label, value)| record.labels.get(label) != Some(value));
        lacked.map(|(label, _)| Obstacle::LacksLabel(label.clone()))
    }
}

const GIB: u128 = 1 << 30;

fn gibibytes(tenths: u128) -> String {
    format!("{}.{} GiB", tenths / 10, tenths % 10)
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::NotAlive => f.write_str("is not alive"),
            Obstacle::Draining => f.write_str("is draining"),
            Obstacle::Cordoned => f.write_str("is cordoned"),
            Obstacle::OtherZone => f.write_str("is in none of the catalog's zones"),
            Obstacle::LacksLabel(label) => {
                write!(f, "has no label '{label}' of the value that the catalog wants")
            }
            Obstacle::NoStatus => f.write_str("has not reported its budget yet"),
            Obstacle::Unreadable => f.write_str("has a record of the catalog that cannot be read"),
            Obstacle::Refused { wait_ms } => {
                write!(f, "has refused the catalog, and is asked again in {} s", wait_ms.div_ceil(1000))
            }
            Obstacle::JustWritten => f.write_str("has a share that was just written"),
            Obstacle::Names(0) => {
                f.write_str("makes names of more than 63 characters: give a shorter 'naming'")
            }
            Obstacle::Names(most) => {
                write!(f, "has {most} machines of the catalog, and no names for more: give 'naming' more #")
            }
            Obstacle::Lacks(Shortage { resource: Resource::Vcpus, needed, left }) => {
                write!(f, "has {left} processors left, and a machine needs {needed}")
            }
            Obstacle::Lacks(Shortage { resource, needed, left }) => {
                let tenths = |bytes: &u64| u128::from(*bytes) * 10;
                let needed = gibibytes(tenths(needed).div_ceil(GIB));
                let left = gibibytes(tenths(left) / GIB);
                write!(f, "has {left} of {resource} left, and a machine needs {needed}")
            }
        }
    }
}

impl fmt::Display for Unplaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unplaced { catalog, machines, why } = self;
        write!(f, "{machines} machines of catalog '{catalog}' are on no host: ")?;
        match why {
            Why::Hosts { hosts, .. } if hosts.is_empty() => f.write_str("the fleet has no hosts"),
            Why::Hosts { hosts, more } => {
                for (n, (host, obstacle)) in hosts.iter().enumerate() {
                    write!(f, "{}host '{host}' {obstacle}", if n > 0 { "; " } else { "" })?;
                }
                if *more > 0 { write!(f, "; and {more} more hosts") } else { Ok(()) }
            }
        }
    }
}
