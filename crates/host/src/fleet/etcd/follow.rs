//! Following the records of a fleet: a list of all at one revision, page by page, and then a watch of what changes. Whatever ends the watch
//! makes it begin again with a list.
//!
//! Owns pages, watches and the search for silence. Invariants: an [`Update::Changes`] continues the update before it without a gap, and
//! has all changes of its revisions.

use super::error::MemberFailure;
use super::link::Link;
use super::member::Member;
use super::request::{REQUEST_TIME, ask};
use etcd_client::{GetOptions, KeyValue, WatchOptions, WatchResponse};
use spillway_fleet::transaction::Revision;
use spillway_fleet::view::{Entry, Update};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Records of a page.
const PAGE: i64 = 1_000;
/// Longest list that is taken, in bytes of keys and values.
const MOST_BYTES: usize = 512 << 20;
/// Time without a message after which a watch is asked whether it lives.
const QUIET: Duration = Duration::from_millis(750);
/// Time that it has to answer then.
const PATIENCE: Duration = Duration::from_millis(750);
/// The longest pause between two lists.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

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

/// Sends updates for as long as they are wanted.
pub async fn follow(link: Arc<Link>, updates: mpsc::Sender<Update>) {
    let prefix = link.prefix();
    let mut pause = Duration::ZERO;
    while !updates.is_closed() {
        let begun = Instant::now();
        let mut is_refused = false;
        match link.member().await {
            Err(error) => {
                is_refused = error.is_permanent();
                link.health.note_follow(Some(error.to_string()));
            }
            Ok(member) => match follow_member(&link, &member, &prefix, &updates).await {
                End::NotWanted => return,
                End::Interrupted => {}
                End::Failed(failure) => {
                    link.health.note_follow(Some(format!("{} {failure}", member.address)));
                    link.leave(&member, &failure);
                    is_refused = !failure.is_of_the_member();
                }
            },
        }
        // At once, unless that has failed just before, or other members would refuse it as well.
        pause = match begun.elapsed() > LONGEST_PAUSE {
            _ if is_refused => REFUSED_PAUSE,
            true => Duration::ZERO,
            false => (pause * 2).clamp(Duration::from_millis(20), LONGEST_PAUSE),
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = updates.closed() => return,
        }
    }
}

/// Lists and watches with one member until something ends that.
async fn follow_member(
    link: &Link,
    member: &Arc<Member>,
    prefix: &str,
    updates: &mpsc::Sender<Update>,
) -> End {
    let (revision, entries) = match list(member, prefix).await {
        Ok(listed) => listed,
        Err(MemberFailure::Answer(11, why)) if is_compacted(&why) => return End::Interrupted,
        Err(failure) => return End::Failed(failure),
    };
    if updates.send(Update::Whole(revision, entries)).await.is_err() {
        return End::NotWanted;
    }
    link.health.note_follow(None);
    match watch(member, prefix, revision, updates).await {
        Err(end) => end,
        Ok(never) => match never {},
    }
}

/// Lists all records, with the revision at which they were so.
pub async fn list(member: &Member, prefix: &str) -> Result<(Revision, Vec<(String, Entry)>), MemberFailure> {
    let end = end_of(prefix);
    let mut records = member.records();
    let (mut next, mut at, mut page) = (prefix.as_bytes().to_vec(), 0, PAGE);
    let (mut entries, mut bytes) = (Vec::new(), 0);
    loop {
        let options = GetOptions::new().with_range(end.clone()).with_limit(page).with_revision(at);
        let answer = match ask(REQUEST_TIME, records.get(next.clone(), Some(options))).await {
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
    let options = WatchOptions::new().with_range(end_of(prefix)).with_start_revision(listed + 1);
    let mut watching = member.watch();
    let opening = watching.watch(prefix, Some(options.with_progress_notify()));
    let (mut requests, mut messages) = ask(REQUEST_TIME, opening).await?.split();
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
                if let Some(update) = read(&message, prefix, &mut revision)?
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

/// Reads a message of a watch. None: nothing has changed.
fn read(message: &WatchResponse, prefix: &str, revision: &mut Revision) -> Result<Option<Update>, End> {
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
    for record in message.events().iter().filter_map(|event| event.kv()) {
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
    fn the_end_of_a_prefix_is_after_all_its_keys() {
        assert_eq!(end_of("/spillway/a/"), b"/spillway/a0");
        assert!(b"/spillway/a/\xff\xff".as_slice() < end_of("/spillway/a/").as_slice());
        assert!(b"/spillway/a-b/meta".as_slice() < b"/spillway/a/".as_slice());
    }
}
