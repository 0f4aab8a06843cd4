//! `spillway event`: past and new events. Owns the format of an event, and reconnects when the daemon restarts.
//!
//! Invariant: an event is shown once, and none is left out silently, whichever daemon raised it.

use super::{Daemon, table, word};
use crate::error::{Exit, Failure};
use crate::output;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use spillway_api::client::Client;
use spillway_api::{Event, EventId, EventKind, List, MOST_ON_A_PAGE};
use std::thread::sleep;
use std::time::Duration;

/// Past events that are looked at for chosen ones.
const LOOKED_AT: usize = 4096;
/// Pause between two attempts to reconnect.
const RETRY: Duration = Duration::from_secs(1);

/// Options of `event`.
#[derive(Debug, Args)]
#[group(skip)]
pub struct Events {
    /// Follow new events until Ctrl-C, also over restarts of spillwayd
    #[arg(short, long)]
    follow: bool,
    /// Number of past events to show
    #[arg(short = 'n', long, value_name = "N", default_value_t = 50)]
    last: u32,
    /// Only events of this kind; may be given more than once
    #[arg(long, value_name = "KIND", value_parser = kind())]
    kind: Vec<EventKind>,
    /// Only events about this object, such as machine/desk-001, catalog/desk, store/local or host; may be given more
    /// than once
    #[arg(long, value_name = "OBJECT")]
    object: Vec<String>,
}

fn kind() -> impl TypedValueParser<Value = EventKind> {
    let words = EventKind::ALL.map(|kind| word(&kind));
    PossibleValuesParser::new(words).map(|chosen| {
        let known = EventKind::ALL.into_iter().find(|kind| word(kind) == chosen);
        known.expect("no other word is possible")
    })
}

/// Shows the events.
pub fn event(daemon: &Daemon, args: &Events) -> Result<(), Failure> {
    let client = daemon.client()?;
    let list = |limit: usize, before: Option<EventId>| {
        let before = before.map(|id| format!("&before={id}")).unwrap_or_default();
        let page: List<Event> = client.get(&format!("/v1/events?limit={limit}{before}"))?;
        Ok(page.items)
    };
    let (last, past) = past(args, list)?;
    let text: String = match daemon.json || args.follow {
        true => past.iter().map(|event| line(event, daemon.json)).collect(),
        false => table(["TIME", "KIND", "OBJECT", "WHAT"], past.iter().map(cells)),
    };
    if !output::print(&text)? || !args.follow {
        return Ok(());
    }
    let mut listener = EventFollower { args, json: daemon.json, last, is_waiting: false };
    while listener.listens(&client)? {
        sleep(RETRY);
    }
    Ok(())
}

/// Returns the id of the last event, and the past events to show, oldest first. Of those that are chosen by kind or object, it looks
/// for as many as were asked for, but not beyond [`LOOKED_AT`]. `list` gives the last events before one, as many as it is asked for.
fn past(
    args: &Events,
    mut list: impl FnMut(usize, Option<EventId>) -> Result<Vec<Event>, Failure>,
) -> Result<(Option<EventId>, Vec<Event>), Failure> {
    let wanted = args.last as usize;
    let is_all = args.kind.is_empty() && args.object.is_empty();
    let most = if is_all { wanted } else { wanted.max(LOOKED_AT) };
    let (mut last, mut before, mut looked_at) = (None, None, 0);
    let mut newest_first = Vec::new();
    loop {
        // Also if none is shown: followers go on after the last one.
        let limit = (most - looked_at).clamp(1, MOST_ON_A_PAGE);
        let page = list(limit, before)?;
        last = last.or(page.last().map(|event| event.id));
        before = page.first().map(|event| event.id);
        looked_at += page.len();
        let is_end = page.len() < limit;
        newest_first.extend(page.into_iter().rev().filter(|event| args.choose(event)));
        if is_end || looked_at >= most || newest_first.len() >= wanted {
            break;
        }
    }
    newest_first.truncate(wanted);
    newest_first.reverse();
    Ok((last, newest_first))
}

impl Events {
    fn choose(&self, event: &Event) -> bool {
        (self.kind.is_empty() || self.kind.contains(&event.kind))
            && (self.object.is_empty() || self.object.contains(&event.object))
    }

    /// Selects events. A loss of events concerns every reader.
    fn hear(&self, event: &Event) -> bool {
        self.choose(event) || event.kind == EventKind::Lost
    }
}

/// Follows the events of a daemon.
struct EventFollower<'a> {
    args: &'a Events,
    json: bool,
    /// Id of the last event that was received, shown or not.
    last: Option<EventId>,
    /// Whether the notice about a missing daemon was printed.
    is_waiting: bool,
}

impl EventFollower<'_> {
    /// Runs until the connection ends. Returns `false` if nobody reads the output.
    fn listens(&mut self, client: &Client) -> Result<bool, Failure> {
        match self.hear(client) {
            Err(gone) if gone.exit == Exit::Unavailable => {
                if !self.is_waiting {
                    output::complain("notice", "spillwayd does not answer any more: waiting for it");
                }
                self.is_waiting = true;
                Ok(true)
            }
            heard => heard.map(|()| false),
        }
    }

    fn hear(&mut self, client: &Client) -> Result<(), Failure> {
        let mut following = client.follow(self.last)?;
        if self.is_waiting {
            output::complain("notice", "spillwayd answers again");
            self.is_waiting = false;
        }
        while let Some(event) = following.next_event()? {
            if self.args.hear(&event) && !output::print(&line(&event, self.json))? {
                return Ok(());
            }
            self.last = Some(event.id);
        }
        Err(Failure::new(Exit::Unavailable, "spillwayd has ended"))
    }
}

pub(super) fn cells(event: &Event) -> [String; 4] {
    let time = event.time.strftime("%Y-%m-%d %H:%M:%S").to_string();
    [time, word(&event.kind), one_line(&event.object), one_line(&event.text)]
}

/// Formats an event for a continuous list: the columns are as wide as most values.
fn line(event: &Event, json: bool) -> String {
    if json {
        return format!("{}\n", serde_json::to_string(event).expect("an event is plain data"));
    }
    let [time, kind, object, text] = cells(event);
    format!("{time}  {kind:<10}  {object:<20}  {text}\n")
}

/// Parts of the text may come from a guest and must not control the terminal.
pub(super) fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(text: &str) -> Event {
        let value = serde_json::json!({
            "id": "9f3c00a1-7", "time": "2026-01-02T03:04:05.6Z", "kind": "rolled-out", "object": "catalog/desk", "text": text,
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn an_event_is_one_line() {
        let told = line(&event("a\nb\x1b[2J"), false);
        assert_eq!(told, "2026-01-02 03:04:05  rolled-out  catalog/desk          a b [2J\n");
        let told = line(&event("a\nb"), true);
        assert_eq!((told.lines().count(), serde_json::from_str::<Event>(&told).unwrap()), (1, event("a\nb")));
    }

    #[test]
    fn all_that_is_named_must_fit() {
        let choose = |kind: &[EventKind], object: &[&str]| {
            let object = object.iter().map(|object| object.to_string()).collect();
            Events { follow: false, last: 1, kind: kind.to_vec(), object }.choose(&event(""))
        };
        assert!(
            choose(&[], &[]) && choose(&[EventKind::Disk, EventKind::RolledOut], &["host", "catalog/desk"])
        );
        assert!(
            !choose(&[EventKind::Disk], &["catalog/desk"]) && !choose(&[EventKind::RolledOut], &["desk"])
        );
    }

    #[test]
    fn past_events_are_looked_for_page_by_page() {
        let all: Vec<Event> = (1..=6000)
            .map(|number| {
                let kind = if number % 1000 == 7 { EventKind::Disk } else { EventKind::Ready };
                let id = EventId { history: 1, number };
                Event { id, kind, ..event("") }
            })
            .collect();
        let shown = |last: u32, kind: &[EventKind]| {
            let mut pages = 0;
            let args = Events { follow: false, last, kind: kind.to_vec(), object: Vec::new() };
            let list = |limit: usize, before: Option<EventId>| {
                pages += 1;
                let end = before.map_or(all.len(), |id| id.number as usize - 1);
                Ok(all[end.saturating_sub(limit)..end].to_vec())
            };
            let Ok((id, past)) = past(&args, list) else { panic!("it was not asked") };
            assert_eq!(id.map(|id| id.number), Some(6000));
            (past.iter().map(|event| event.id.number).collect::<Vec<_>>(), pages)
        };
        assert_eq!(shown(0, &[]), (vec![], 1));
        assert_eq!(shown(3, &[]), (vec![5998, 5999, 6000], 1));
        assert_eq!(shown(2500, &[]), ((3501..=6000).collect(), 3));
        assert_eq!(shown(9000, &[]), ((1..=6000).collect(), 7));
        assert_eq!(shown(2, &[EventKind::Disk]), (vec![4007, 5007], 2));
        assert_eq!(shown(9, &[EventKind::Disk]).0, [2007, 3007, 4007, 5007], "no more are looked at");
    }
}
