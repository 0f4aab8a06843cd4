//! How many sessions a system carries: those that are active when responses first exceed their baseline by a threshold.
//!
//! After Login VSI's VSImax 4.1 in three things: the baseline is the mean of the 15 fastest less the 2 fastest of them; a response
//! counts as the mean of several; and the threshold is added to the baseline (docs/design/044-session-workloads.md says what differs).
//! Invariant: no figure where none can be computed: the sessions were too few, or carried.

use crate::study::Action;
use std::collections::BTreeMap;

/// Samples of which a baseline is made, the fastest first.
const FASTEST: usize = 15;
/// Of them, those that are too fast to be true.
const TOO_FAST: usize = 2;
/// Fewest responses whose mean counts.
const FEWEST: usize = 5;

/// `logon_s`, `score.active`: most sessions at a time, and `score.sessions` if it was reached. Actions are by time.
pub fn figures(actions: &[Action], threshold_ms: f64, figures: &mut BTreeMap<String, f64>) {
    let logons: Vec<f64> = actions.iter().filter(|a| a.name == "logon").map(|a| a.took_ms / 1000.0).collect();
    if !logons.is_empty() {
        figures.insert("logon_s".into(), logons.iter().sum::<f64>() / logons.len() as f64);
    }
    let active = active(actions);
    let most = active.iter().copied().max().unwrap_or(0);
    if most < 2 {
        return;
    }
    figures.insert("score.active".into(), most as f64);
    if let Some(sessions) = sessions(actions, &active, threshold_ms) {
        figures.insert("score.sessions".into(), sessions as f64);
    }
}

/// Sessions that are active when each action begins: from the begin of a session's first action to the end of its last.
fn active(actions: &[Action]) -> Vec<usize> {
    let mut spans: BTreeMap<(u32, u32), (f64, f64)> = BTreeMap::new();
    for action in actions {
        let end = action.at_s + action.took_ms / 1000.0;
        let span = spans.entry((action.machine, action.session)).or_insert((action.at_s, end));
        *span = (span.0.min(action.at_s), span.1.max(end));
    }
    let at = |time: f64| spans.values().filter(|(from, to)| (*from..=*to).contains(&time)).count();
    actions.iter().map(|a| at(a.at_s)).collect()
}

fn sessions(actions: &[Action], active: &[usize], threshold_ms: f64) -> Option<usize> {
    let mut by_name: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for action in actions {
        by_name.entry(&action.name).or_default().push(action.took_ms);
    }
    let baselines: BTreeMap<&str, f64> =
        by_name.into_iter().map(|(name, took)| (name, baseline(took))).collect();
    let beyond: Vec<f64> = actions.iter().map(|a| a.took_ms - baselines[a.name.as_str()]).collect();
    // The last ones: as many as there are sessions, so that one session's bad luck is not everybody's.
    (0..actions.len()).find_map(|i| {
        let from = (i + 1).checked_sub(active[i].max(FEWEST))?;
        let mean = beyond[from..=i].iter().sum::<f64>() / (i + 1 - from) as f64;
        (mean > threshold_ms).then_some(active[i])
    })
}

/// Of what is done rarely a half of the samples has to do.
fn baseline(mut took: Vec<f64>) -> f64 {
    took.sort_by(f64::total_cmp);
    took.truncate(FASTEST.min(took.len().div_ceil(2).max(1)));
    let rest = if took.len() > 2 * TOO_FAST { &took[TOO_FAST..] } else { &took[..] };
    rest.iter().sum::<f64>() / rest.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sessions that begin one second after the other, each acting every second; a response is what `took` says for so many of them.
    fn storm(sessions: u32, took: impl Fn(u32) -> f64) -> Vec<Action> {
        let mut actions = Vec::new();
        for second in 0..sessions + 5 {
            for machine in 0..sessions.min(second + 1) {
                let count = sessions.min(second + 1);
                let at_s = f64::from(second) + f64::from(machine) / 1000.0;
                actions.push(Action { machine, session: 0, name: "save".into(), at_s, took_ms: took(count) });
            }
        }
        actions
    }

    fn score(actions: &[Action]) -> Option<f64> {
        let mut all = BTreeMap::new();
        figures(actions, 1000.0, &mut all);
        all.get("score.sessions").copied()
    }

    #[test]
    fn the_score_is_where_responses_leave_their_baseline() {
        assert_eq!(score(&storm(30, |_| 50.0)), None, "all are carried");
        // The thirteenth comes after the others of its second.
        let reached = score(&storm(30, |n| if n > 12 { 1500.0 } else { 50.0 }));
        assert!(matches!(reached, Some(12.0 | 13.0)), "{reached:?}");
        assert_eq!(
            score(&storm(30, |n| if n > 12 { 1040.0 } else { 50.0 })),
            None,
            "less than a second beyond"
        );
        assert_eq!(score(&storm(1, |_| 5000.0)), None, "one session is no storm");
        assert_eq!(score(&[]), None);
        let mut one_slow = storm(30, |_| 50.0);
        one_slow[200].took_ms = 4000.0;
        assert_eq!(score(&one_slow), None, "one that waited is not everybody");
    }

    #[test]
    fn a_baseline_leaves_out_the_fastest() {
        let mut took: Vec<f64> = (1..=40).map(f64::from).collect();
        took.reverse();
        assert_eq!(baseline(took), 9.0, "3 to 15");
        assert_eq!(baseline(vec![7.0]), 7.0);
        assert_eq!(baseline(vec![9.0, 1.0]), 1.0);
    }
}
