//! Following the records of a fleet: a list of all at one revision, page by page, and then a watch of what changes. Whatever ends the watch
//! makes it begin again with a list.
//!
//! Owns pages, watches and the search for silence. Invariants: an [`Update::Changes`] continues the update before it without a gap, and
//! has all changes of its revisions.

use super::error::MemberFailure;
use super::link::Link;
use super::member::Member;
use super::random_below;
use super::request::ask;
use etcd_client::{GetOptions, KeyValue, WatchOptions, WatchResponse};
use spillway_fleet::transaction::Revision;
use spillway_fleet::view::{Entry, Update};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Records of a page.
const PAGE: i64 = 1_000;
/// Time in which a page, or the first word of a watch, must come. With the pause after it, another member has answered within 2 s.
const PAGE_TIME: Duration = Duration::from_millis(1_500);
/// Longest list that is taken, in bytes of keys and values.
const MOST_BYTES: usize = 512 << 20;
/// Time without a message after which a watch is asked whether it lives.
const QUIET: Duration = Duration::from_millis(750);
/// Time that it has to answer then.
const PATIENCE: Duration = Duration::from_millis(750);
/// Longest pause before the first list after a failed one. Each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause between two lists.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Least records of a page that a slow member is asked for.
const LEAST_PAGE: i64 = 50;
/// Time for which a watch lasts if nothing is wrong with the member.
const SHORT: Duration = Duration::from_millis(250);
/// The pause after what other members would refuse as well.
const REFUSED_PAUSE: Duration = Duration::from_secs(5);

/// Why it begins again.
enum End {
    /// Nobody wants updates any more.
    NotWanted,
    /// Something that a new list helps against: compaction, a cancelled watch, a member that was left.
    Interrupted,
    /// The member has failed.
    Failed(MemberFailure),
}

impl From<MemberFailure> for End {
    fn from(failure: MemberFailure) -> End {
        End::Failed(failure)
    }
}

/// How often and how much it asks for, by what has come of it.
struct Pace {
    /// Lists in a row that have failed.
    failed_lists: u32,
    /// Watches in a row that have ended at once.
    short_watches: u32,
    /// Records of a page.
    page: i64,
}

impl Pace {
    fn new() -> Pace {
        Pace { failed_lists: 0, short_watches: 0, page: PAGE }
    }

    /// Takes that a list has come.
    fn listed(&mut self) {
        (self.failed_lists, self.page) = (0, PAGE);
    }

    /// Returns the longest pause after a list that has failed. All hosts may have lost the same member, and lists are what etcd is slowest
    /// with.
    fn after_list(&mut self, failure: &MemberFailure) -> Duration {
        if matches!(failure, MemberFailure::Silent(_)) {
            self.page = (self.page / 2).max(LEAST_PAGE);
        }
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failed_lists.min(16)).min(LONGEST_PAUSE);
        self.failed_lists = self.failed_lists.saturating_add(1);
        pause
    }

    /// Returns the longest pause after a watch: none, unless it has ended at once.
    fn after_watch(&mut self, lasted: Duration) -> Duration {
        if lasted > SHORT {
            self.short_watches = 0;
            return Duration::ZERO;
        }
        self.short_watches = self.short_watches.saturating_add(1);
        Duration::from_millis(10).saturating_mul(1 << self.short_watches.min(16)).min(FIRST_PAUSE)
    }
}

/// Sends updates for as long as they are wanted.
pub async fn follow(link: Arc<Link>, updates: mpsc::Sender<Update>) {
    let prefix = link.prefix();
    let mut pace = Pace::new();
    while !updates.is_closed() {
        let pause = match link.member().await {
            Err(error) => {
                let is_refused = error.is_permanent();
                link.health.note_follow(Some(error.to_string()));
                if is_refused { REFUSED_PAUSE } else { FIRST_PAUSE }
            }
            Ok(member) => match follow_member(&link, &member, &prefix, &updates, &mut pace).await {
                Some(pause) => pause,
                None => return,
            },
        };
        // Others have failed at the same moment.
        let pause = pause / 2 + Duration::from_millis(random_below(pause.as_millis() as u64 / 2 + 1));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = updates.closed() => return,
        }
    }
}

/// Lists and watches with one member until something ends that. Returns the longest pause until it is done again. `None`: nobody wants
/// updates any more.
async fn follow_member(
    link: &Link,
    member: &Arc<Member>,
    prefix: &str,
    updates: &mpsc::Sender<Update>,
    pace: &mut Pace,
) -> Option<Duration> {
    let failed = |failure: &MemberFailure, pause: Duration| {
        link.health.note_follow(Some(format!("{} {failure}", member.address)));
        link.leave(member, failure);
        Some(if failure.is_of_the_member() { pause } else { REFUSED_PAUSE })
    };
    let (revision, entries) = match list(member, prefix, pace.page).await {
        Ok(listed) => listed,
        Err(failure) => {
            let pause = pace.after_list(&failure);
            return match &failure {
                MemberFailure::Answer(11, why) if is_compacted(why) => Some(pause),
                _ => failed(&failure, pause),
            };
        }
    };
    pace.listed();
    updates.send(Update::Whole(revision, entries)).await.ok()?;
    link.health.note_follow(None);
    let begun = Instant::now();
    let Err(end) = watch(member, prefix, revision, updates).await;
    let pause = pace.after_watch(begun.elapsed());
    match end {
        End::NotWanted => None,
        End::Interrupted => Some(pause),
        End::Failed(failure) => failed(&failure, pause),
    }
}

/// Lists all records, so many at a time, with the revision at which they were so.
async fn list(
    member: &Member,
    prefix: &str,
    mut page: i64,
) -> Result<(Revision, Vec<(String, Entry)>), MemberFailure> {
    let end = end_of(prefix);
    let mut records = member.records();
    let (mut next, mut at) = (prefix.as_bytes().to_vec(), 0);
    let (mut entries, mut bytes) = (Vec::new(), 0);
    loop {
        let options = GetOptions::new().with_range(end.clone()).with_limit(page).with_revision(at);
        let answer = match ask(PAGE_TIME, records.get(next.clone(), Some(options))).await {
            Ok(answer) => answer,
            // OUT_OF_RANGE without the words of etcd: the page is longer than is taken.
            Err(MemberFailure::Answer(11, why)) if page > 1 && !is_compacted(&why) => {
                page /= 4;
                page = page.max(1);
                continue;
            }
            Err(failure) => return Err(failure),
        };
        if at == 0 {
            at = answer.header().map_or(0, |header| header.revision());
            if at <= 0 {
                return Err(MemberFailure::Answer(13, "a list has no revision".into()));
            }
        }
        let Some(last) = answer.kvs().last() else { return Ok((at, entries)) };
        if last.key() < next.as_slice() {
            return Err(MemberFailure::Answer(13, "a list is out of order".into()));
        }
        next = last.key().to_vec();
        next.push(0);
        for record in answer.kvs() {
            bytes += record.key().len() + record.value().len();
            entries.extend(entry(record, prefix));
        }
        if bytes > MOST_BYTES {
            let why =
                format!("the records take more than {} MiB: what else is below {prefix}?", MOST_BYTES >> 20);
            return Err(MemberFailure::Answer(8, why));
        }
        if !answer.more() {
            return Ok((at, entries));
        }
    }
}

/// Whether etcd says that a revision is not there any more.
fn is_compacted(why: &str) -> bool {
    why.contains("revision has been compacted")
}

/// Watches what changes after a revision. Ends only by an error.
async fn watch(
    member: &Arc<Member>,
    prefix: &str,
    listed: Revision,
    updates: &mpsc::Sender<Update>,
) -> Result<std::convert::Infallible, End> {
    // It begins with the revision of the list, whose records come once more: a watch from a later one is not answered when it is asked for its
    // progress, as long as nothing changes.
    let options = WatchOptions::new().with_range(end_of(prefix)).with_start_revision(listed);
    let mut watching = member.watch();
    let opening = watching.watch(prefix, Some(options.with_progress_notify()));
    let (mut requests, mut messages) = ask(PAGE_TIME, opening).await?.split();
    let mut heard = Instant::now();
    let mut is_asked = false;
    let mut revision = listed;
    loop {
        let deadline = heard + if is_asked { QUIET + PATIENCE } else { QUIET };
        tokio::select! {
            // What has come counts before the time does: this process may have stood still itself.
            biased;
            message = messages.message() => {
                let message = message.map_err(super::request::failure)?;
                let message = message.ok_or(MemberFailure::Unreachable("it has ended the watch".into()))?;
                if let Some(update) = read(&message, prefix, listed, &mut revision)?
                    && updates.send(update).await.is_err()
                {
                    return Err(End::NotWanted);
                }
                (heard, is_asked) = (Instant::now(), false);
            }
            () = member.until_left() => return Err(End::Interrupted),
            () = updates.closed() => return Err(End::NotWanted),
            () = tokio::time::sleep_until(deadline) => {
                if is_asked {
                    return Err(MemberFailure::Silent(QUIET + PATIENCE).into());
                }
                ask(PATIENCE, requests.request_progress()).await?;
                is_asked = true;
            }
        }
    }
}

/// Reads a message of a watch. None: nothing has changed since the list of this revision.
fn read(
    message: &WatchResponse,
    prefix: &str,
    listed: Revision,
    revision: &mut Revision,
) -> Result<Option<Update>, End> {
    if message.canceled() || message.compact_revision() != 0 {
        return Err(match message.cancel_reason() {
            why if why.contains("no leader") => MemberFailure::NoLeader.into(),
            why if why.contains("permission denied") => {
                MemberFailure::Denied(why.chars().take(300).collect()).into()
            }
            _ => End::Interrupted,
        });
    }
    let mut changes = Vec::with_capacity(message.events().len());
    let records = message.events().iter().filter_map(|event| event.kv());
    for record in records.filter(|record| record.mod_revision() != listed) {
        if record.mod_revision() < *revision {
            return Err(MemberFailure::Answer(13, "a watch goes back".into()).into());
        }
        *revision = record.mod_revision();
        // Of a deleted record only key and revision are there.
        if record.create_revision() == 0 {
            changes.extend(key(record, prefix).map(|key| (key, None)));
        } else {
            changes.extend(entry(record, prefix).map(|(key, entry)| (key, Some(entry))));
        }
    }
    Ok((!changes.is_empty()).then_some(Update::Changes(*revision, changes)))
}

/// A record, if it is below the prefix.
fn entry(record: &KeyValue, prefix: &str) -> Option<(String, Entry)> {
    let (created, modified) = (record.create_revision(), record.mod_revision());
    Some((key(record, prefix)?, Entry { value: record.value().to_vec(), created, modified }))
}

/// Its key without the prefix. One that is not text has a replacement for what is none, and is no key of a record so.
fn key(record: &KeyValue, prefix: &str) -> Option<String> {
    record.key().strip_prefix(prefix.as_bytes()).map(|key| String::from_utf8_lossy(key).into_owned())
}

/// The first key after all that begin with the prefix, which ends with a slash.
fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_after_failed_lists_grow_and_end_with_one_that_comes() {
        let mut pace = Pace::new();
        let silent = MemberFailure::Silent(PAGE_TIME);
        let pauses: Vec<_> = (0..8).map(|_| pace.after_list(&silent).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1_600, 3_200, 6_400, 10_000]);
        assert_eq!(pace.page, LEAST_PAGE);
        pace.listed();
        assert_eq!((pace.after_list(&MemberFailure::NoLeader), pace.page), (FIRST_PAUSE, PAGE));
        // A watch that has lasted is followed by a list at once.
        assert_eq!(pace.after_watch(Duration::from_secs(1)), Duration::ZERO);
        let pauses: Vec<_> = (0..6).map(|_| pace.after_watch(Duration::ZERO).as_millis()).collect();
        assert_eq!(pauses, [20, 40, 80, 100, 100, 100]);
    }

    #[test]
    fn the_end_of_a_prefix_is_after_all_its_keys() {
        assert_eq!(end_of("/spillway/a/"), b"/spillway/a0");
        assert!(b"/spillway/a/\xff\xff".as_slice() < end_of("/spillway/a/").as_slice());
        assert!(b"/spillway/a-b/meta".as_slice() < b"/spillway/a/".as_slice());
    }
}
