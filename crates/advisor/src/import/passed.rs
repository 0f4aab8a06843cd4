//! Lines that an import passes over, counted by why.
//!
//! Owns the words for it. Invariant: of each line that is neither empty nor bad there is an event, or one is added here.

/// Why a line is none of the device's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passed {
    /// A request of another device than the one that is wanted.
    OtherDevice,
    /// Of blkparse: another event of a request than the one that counts.
    OtherEvent,
    /// Of blkparse: the end of a flush's data, which had none.
    NoData,
    /// A command that neither reads, writes, discards nor flushes: it is for the device, or its kind is not known.
    Command,
    /// Of SYSTOR '17: neither a read nor a write.
    NoOperation,
    /// A request of no bytes.
    Empty,
    /// Of fio: a file that is opened or closed, a time to wait.
    OfFiles,
    /// Names of fields, figures of the recording.
    Heading,
}

impl Passed {
    /// All, in the order in which they are told.
    pub const ALL: [Passed; 8] = [
        Passed::OtherDevice,
        Passed::OtherEvent,
        Passed::NoData,
        Passed::Command,
        Passed::NoOperation,
        Passed::Empty,
        Passed::OfFiles,
        Passed::Heading,
    ];

    /// What they are, with their number before it.
    pub fn in_words(self) -> &'static str {
        match self {
            Passed::OtherDevice => "requests of other devices",
            Passed::OtherEvent => "other events of requests",
            Passed::NoData => "ends of flushes without data",
            Passed::Command => "commands that neither read, write, discard nor flush",
            Passed::NoOperation => "lines without an operation",
            Passed::Empty => "requests of no bytes",
            Passed::OfFiles => "lines about files and waits",
            Passed::Heading => "lines of headings and summaries",
        }
    }
}

/// The number of lines passed over, by why.
#[derive(Debug, Default)]
pub(super) struct Counts([u64; Passed::ALL.len()]);

impl Counts {
    pub fn add(&mut self, what: Passed) {
        self.0[what as usize] += 1;
    }

    /// All kinds of which there are any, with their number.
    pub fn iter(&self) -> impl Iterator<Item = (Passed, u64)> + '_ {
        Passed::ALL.into_iter().zip(self.0).filter(|(_, count)| *count > 0)
    }
}
