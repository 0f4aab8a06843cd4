//! Events of the host.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

/// Id of an event: its history and its number there, as text `HISTORY-NUMBER`, such as `9f3c00a1-17`.
///
/// Numbers increase, also over restarts of the daemon. When the history of a host was lost, a new one begins with another
/// id, so that an id of the earlier one is never mistaken for one of the new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct EventId {
    /// Id of the history, chosen at random when it began.
    pub history: u32,
    /// Number of the event, from 1 on; 0 is before the first.
    pub number: u64,
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}-{}", self.history, self.number)
    }
}

impl FromStr for EventId {
    type Err = String;

    fn from_str(text: &str) -> Result<EventId, String> {
        let plain = |part: &str, digits: fn(&u8) -> bool| part.as_bytes().iter().all(digits);
        let (history, number) = text.split_once('-').unwrap_or_default();
        let is_right =
            history.len() == 8 && plain(history, u8::is_ascii_hexdigit) && plain(number, u8::is_ascii_digit);
        let id = is_right.then(|| {
            Some(EventId { history: u32::from_str_radix(history, 16).ok()?, number: number.parse().ok()? })
        });
        let wrong =
            || format!("'{}' is not the id of an event: ids look like 9f3c00a1-17", text.escape_debug());
        id.flatten().ok_or_else(wrong)
    }
}

impl TryFrom<String> for EventId {
    type Error = String;

    fn try_from(text: String) -> Result<EventId, String> {
        text.parse()
    }
}

impl From<EventId> for String {
    fn from(id: EventId) -> String {
        id.to_string()
    }
}

impl PartialSchema for EventId {
    fn schema() -> RefOr<Schema> {
        let description = "The id of an event: its history (8 hexadecimal digits) and its number there, which rises, over \
                           restarts of the daemon too.";
        let pattern = "^[0-9a-f]{8}-[0-9]{1,20}$";
        ObjectBuilder::new()
            .schema_type(Type::String)
            .description(Some(description))
            .pattern(Some(pattern))
            .into()
    }
}

impl ToSchema for EventId {}

/// An event: something that happened to an object of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Id of the event, from which a client continues the list.
    pub id: EventId,
    /// Time at which the event was raised.
    #[schema(value_type = String, format = DateTime)]
    pub time: Timestamp,
    /// Kind of the event, a stable word for programs.
    pub kind: EventKind,
    /// Object that the event is about, such as `machine/desk-001`.
    pub object: String,
    /// What happened, in words for people.
    pub text: String,
}

/// Kind of an event: what has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// A machine was started and its VMM runs.
    Started,
    /// The guest of a machine reported that it is ready.
    Ready,
    /// A machine has stopped; none of its processes runs.
    Stopped,
    /// A machine was reset: its disk has discarded what was written.
    Reset,
    /// The VMM or the disk of a machine has ended unexpectedly.
    Crashed,
    /// A machine could not be brought to its desired state.
    Failed,
    /// A client has claimed a machine for itself.
    Claimed,
    /// A claim was released or has expired.
    Released,
    /// The disk of a machine reports a level of its cache, a full cache, or a fault.
    Disk,
    /// An update has reached all machines.
    RolledOut,
    /// A store is filling up, or has enough space again.
    Space,
    /// The host is short of memory, or has enough again.
    Memory,
    /// Events before this one were lost, or may be missing: read the current state of the objects that you follow.
    Lost,
    /// A machine should run but does not fit into the host's budget.
    Waiting,
    /// A rollout has stalled or progressed again, or was paused, resumed or aborted.
    Rollout,
    /// The host has joined its fleet or lost its connection to it, or the fleet has replaced a host, or does not.
    Fleet,
}

impl EventKind {
    /// All kinds of events, in the order of the documentation.
    pub const ALL: [EventKind; 16] = [
        EventKind::Started,
        EventKind::Ready,
        EventKind::Stopped,
        EventKind::Reset,
        EventKind::Crashed,
        EventKind::Failed,
        EventKind::Claimed,
        EventKind::Released,
        EventKind::Disk,
        EventKind::RolledOut,
        EventKind::Space,
        EventKind::Memory,
        EventKind::Lost,
        EventKind::Waiting,
        EventKind::Rollout,
        EventKind::Fleet,
    ];
}

#[cfg(test)]
mod tests {
    use super::*;
    use utoipa::PartialSchema;

    #[test]
    fn an_id_is_text() {
        let id = EventId { history: 0x9f3c_00a1, number: 17 };
        assert_eq!((id.to_string().as_str(), "9f3c00a1-17".parse()), ("9f3c00a1-17", Ok(id)));
        for wrong in [
            "",
            "17",
            "-",
            "9f3c00a1-",
            "9f3c00a-17",
            "9f3c00a1-+7",
            "+f3c00a1-7",
            "9f3c00a1-99999999999999999999",
        ] {
            assert!(wrong.parse::<EventId>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn all_are_all() {
        let schema = serde_json::to_value(EventKind::schema()).unwrap();
        let words: Vec<String> = serde_json::from_value(schema["enum"].clone()).unwrap();
        let all = EventKind::ALL.map(|kind| serde_json::to_value(kind).unwrap());
        assert_eq!(all.to_vec(), words);
    }
}
