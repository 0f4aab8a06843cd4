//! What happens on the host.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Which one since the daemon began, from 1 on.
    pub number: u64,
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub time: Timestamp,
    /// What sort of thing, for programs.
    pub kind: EventKind,
    /// To what, such as `machine/desk-001`.
    pub object: String,
    /// For people.
    pub text: String,
}

/// What sort of thing has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// A machine runs.
    Started,
    /// Its guest is ready.
    Ready,
    /// Nothing of it runs any more.
    Stopped,
    /// It forgot what it had written.
    Reset,
    /// Its VMM or its disk has ended by itself.
    Crashed,
    /// It could not be brought to what is wanted.
    Failed,
    /// It was claimed.
    Claimed,
    /// It was given back, or its claim is over.
    Released,
    /// Its disk says so: of the cache's level, of a full cache, of a disk that fails.
    Disk,
    /// An update has reached all machines.
    RolledOut,
    /// A store is filling up, or has room again.
    Space,
    /// The host is short of memory, or has enough again.
    Memory,
    /// A machine is to run, and the host's budget has no space for it.
    Waiting,
    /// A rollout is stalled, goes on again, or was paused, resumed or aborted.
    Rollout,
}

impl EventKind {
    /// All of them.
    pub const ALL: [EventKind; 14] = [
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
        EventKind::Waiting,
        EventKind::Rollout,
    ];
}

#[cfg(test)]
mod tests {
    use super::*;
    use utoipa::PartialSchema;

    #[test]
    fn all_are_all() {
        let schema = serde_json::to_value(EventKind::schema()).unwrap();
        let words: Vec<String> = serde_json::from_value(schema["enum"].clone()).unwrap();
        let all = EventKind::ALL.map(|kind| serde_json::to_value(kind).unwrap());
        assert_eq!(all.to_vec(), words);
    }
}
