//! Transactions of machines with names of the fleet. Owns how many of them are in one.
//!
//! Invariant: both records of a name are written in one transaction, which compares all that the name was decided on.

use super::bundle::{Bundle, in_office};
use super::flights::{Effects, NameEffect};
use crate::placement::NameChange;
use crate::transaction::{Comparison, MOST_OPERATIONS, Revision, Transaction};
use crate::view::FleetView;
use spillway_api::Name;
use std::collections::BTreeSet;

/// Most machines of a transaction.
const MOST_NAMES: usize = 40;

/// Divides changes of names into transactions. Each change of a catalog that is apart has one of its own.
pub(super) fn bundles(
    view: &FleetView,
    term: Revision,
    changes: &[NameChange],
    apart: &BTreeSet<&Name>,
) -> Vec<Bundle> {
    let begin = || Transaction { comparisons: in_office(view, term), writes: Vec::new() };
    let (mut done, mut open, mut names) = (Vec::new(), begin(), Vec::<NameEffect>::new());
    for change in changes {
        let new: Vec<&Comparison> =
            change.comparisons.iter().filter(|comparison| !open.comparisons.contains(comparison)).collect();
        let fits = open.comparisons.len() + new.len() <= MOST_OPERATIONS
            && open.writes.len() + change.writes.len() <= MOST_OPERATIONS
            && names.len() < MOST_NAMES;
        let is_alone =
            apart.contains(&change.catalog) || names.last().is_some_and(|last| apart.contains(&last.catalog));
        if !names.is_empty() && (!fits || is_alone) {
            let (transaction, names) = (std::mem::replace(&mut open, begin()), std::mem::take(&mut names));
            done.push(Bundle { transaction, effects: Effects::of_names(names) });
        }
        for comparison in &change.comparisons {
            if !open.comparisons.contains(comparison) {
                open.comparisons.push(comparison.clone());
            }
        }
        open.writes.extend(change.writes.iter().cloned());
        names.push(NameEffect {
            catalog: change.catalog.clone(),
            machine: change.machine.clone(),
            host: change.host.clone(),
            compared: change.compared,
        });
    }
    if !open.writes.is_empty() {
        done.push(Bundle { transaction: open, effects: Effects::of_names(names) });
    }
    done
}
