//! Formats what hosts are to have of catalogs, and what they have reported. Decides nothing.

use super::super::table;
use spillway_api::{FleetShare, Name};

/// Columns of a share, after the one that names its host or its catalog.
const COLUMNS: [&str; 8] = ["WANTED", "VERSION", "MACHINES", "READY", "OFF", "UPDATED", "CLAIMED", "FAILED"];

/// Sums of shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareTotals {
    /// Machines that hosts are to have.
    pub wanted: u64,
    /// Machines that hosts have.
    pub count: u64,
    /// Of these, those that are ready.
    pub ready: u64,
    /// Of all, those that are claimed.
    pub claimed: u64,
    /// Of all, those that cannot be started.
    pub failed: u64,
}

impl ShareTotals {
    /// Adds up shares.
    pub fn of<'a>(shares: impl IntoIterator<Item = &'a FleetShare>) -> ShareTotals {
        shares.into_iter().fold(ShareTotals::default(), |sum, share| ShareTotals {
            wanted: sum.wanted + u64::from(share.wanted),
            count: sum.count + u64::from(share.count),
            ready: sum.ready + u64::from(share.ready),
            claimed: sum.claimed + u64::from(share.claimed),
            failed: sum.failed + u64::from(share.failed),
        })
    }
}

/// Formats the shares of a host, one line for each catalog.
pub fn by_catalog(shares: &[FleetShare]) -> String {
    let [a, b, c, d, e, f, g, h] = COLUMNS;
    let rows = shares.iter().map(|share| {
        let [a, b, c, d, e, f, g, h] = numbers(share);
        [share.catalog.to_string(), a, b, c, d, e, f, g, h]
    });
    table(["CATALOG", a, b, c, d, e, f, g, h], rows)
}

/// Formats the shares of a catalog, one line for each host.
pub fn by_host<'a>(shares: &[FleetShare], zone: impl Fn(&Name) -> Option<&'a Name>) -> String {
    let [a, b, c, d, e, f, g, h] = COLUMNS;
    let rows = shares.iter().map(|share| {
        let zone = zone(&share.host).map_or("-".into(), Name::to_string);
        let [a, b, c, d, e, f, g, h] = numbers(share);
        [share.host.to_string(), zone, a, b, c, d, e, f, g, h]
    });
    table(["HOST", "ZONE", a, b, c, d, e, f, g, h], rows)
}

fn numbers(share: &FleetShare) -> [String; 8] {
    let FleetShare { wanted, version, count, ready, off, updated, claimed, failed, .. } = share;
    [wanted, version, count, ready, off, updated, claimed, failed].map(u32::to_string)
}

/// Formats why hosts do not do what their shares say, one line for each of these shares.
pub fn refusals<'a>(shares: impl IntoIterator<Item = &'a FleetShare>) -> String {
    let refused = shares.into_iter().filter_map(|share| share.refused.as_deref().map(|why| (share, why)));
    refused
        .map(|(share, why)| format!("{} refuses {}: {}\n", share.host, share.catalog, why.replace('\n', " ")))
        .collect()
}
