//! A user of an image: the connection that its supervisor opened and its worker asks on. Owns the bound of its questions, and with it
//! that of the memory that a user can hold: at most a chunk for each question, and for each answer that it does not read.
//!
//! Invariants: a connection is of one image, and learns nothing of another. It ends when its user goes, whatever is still to be
//! answered.

use super::cache::{Brought, Cache, ServedImage};
use super::packets::Connection;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use spillway_image::ResidencyWriter;
use spillway_image::asks::{ANSWER_BYTES, Answer, MOST_ASKED, Opened, answer, asked, opens};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use tokio::task::JoinSet;

const MOST_PACKET_BYTES: usize = 64;
/// Questions of a connection at a time: more than a worker asks, so that one of another release may ask more than this one's.
const MOST_OPEN: usize = 2 * MOST_ASKED;
/// Space for answers that a user has not read, in bytes as the kernel counts them: about five answers.
const UNREAD_BYTES: usize = 4 << 10;
/// Flights in a row that may be from before their user came: one for other hosts and the store, and one for the store alone that the
/// next one has joined.
const MOST_STALE: usize = 2;

/// Serves a connection until it ends.
pub async fn serve(cache: Arc<Cache>, connection: Connection) -> io::Result<()> {
    connection.bound_unread(UNREAD_BYTES)?;
    let connection = Arc::new(connection);
    let mut packet = [0; MOST_PACKET_BYTES];
    let named = opens(connection.receive(&mut packet).await?);
    let Some(image) = named.and_then(|root| cache.image(&root)) else {
        return connection.send(b"unknown", &[]).await;
    };
    image.touch();
    let done = serve_image(&cache, &image, connection).await;
    // Most of what it read needed nobody to be asked.
    image.touch();
    done
}

async fn serve_image(
    cache: &Arc<Cache>,
    image: &Arc<ServedImage>,
    connection: Arc<Connection>,
) -> io::Result<()> {
    let mut packet = [0; MOST_PACKET_BYTES];
    let user = Arc::clone(image);
    let opened =
        tokio::task::spawn_blocking(move || user.cached.for_user()).await.map_err(io::Error::other)?;
    let (file, residency) = opened?;
    let index = image.cached.index();
    let opened = Opened { size_bytes: index.size_bytes, chunk_bytes: index.chunk_bytes };
    connection.send(&opened.packet(), &[file.as_fd(), residency.memory()]).await?;
    // The user has it now, and with it the lock.
    drop(file);
    let chunks = index.digests.len();
    // Nobody waits any more for these when this ends; the flights go on.
    let mut replies = JoinSet::new();
    loop {
        let received = tokio::select! {
            received = connection.receive(&mut packet) => received?,
            // An answer that cannot be given ends the connection: its user connects again, and repeats its questions.
            Some(replied) = replies.join_next() => {
                replied.map_err(io::Error::other)??;
                continue;
            }
        };
        let Some(chunk) = asked(received) else { return Ok(()) };
        // A reply ends in the step that sends it, and all steps are in one thread: what its user has got is among the ended ones.
        while let Some(replied) = replies.try_join_next() {
            replied.map_err(io::Error::other)??;
        }
        if chunk as usize >= chunks || replies.len() >= MOST_OPEN {
            return Ok(());
        }
        let (cache, image, connection) = (Arc::clone(cache), Arc::clone(image), Arc::clone(&connection));
        let residency = Arc::clone(&residency);
        replies.spawn(async move { reply(&cache, &image, &connection, &residency, chunk).await });
    }
}

async fn reply(
    cache: &Arc<Cache>,
    image: &Arc<ServedImage>,
    connection: &Connection,
    residency: &ResidencyWriter,
    chunk: u32,
) -> io::Result<()> {
    let packet = |kind| -> [u8; ANSWER_BYTES] { answer(chunk, kind) };
    let is_unseen =
        |brought: &Brought| matches!(brought, Brought::Resident) && !residency.has(u64::from(chunk));
    let mut brought = cache.bring(image, chunk).await;
    for _ in 0..MOST_STALE {
        if !is_unseen(&brought) {
            break;
        }
        // That flight is from before this user came: the chunk was removed since. What a flight from now on brings is not, as long
        // as the user has the file.
        brought = cache.bring(image, chunk).await;
    }
    if is_unseen(&brought) {
        // So it has not got the file any more.
        return Err(io::ErrorKind::NotConnected.into());
    }
    match brought {
        Brought::Resident => connection.send(&packet(Answer::Resident), &[]).await,
        Brought::Passed(bytes) => {
            // In this thread: one that waits elsewhere would hold the bytes although its user has gone.
            let content = in_memory(&bytes)?;
            drop(bytes);
            connection.send(&packet(Answer::Passed), &[content.as_fd()]).await
        }
        Brought::Damaged(why) => {
            image.tell_damaged(chunk, &why);
            connection.send(&packet(Answer::Damaged), &[]).await
        }
    }
}

/// A file in memory that nobody can change.
fn in_memory(bytes: &[u8]) -> io::Result<File> {
    let file: File = memfd_create("chunk", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?.into();
    file.write_all_at(bytes, 0)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
    Ok(file)
}
