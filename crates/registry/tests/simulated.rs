//! Pushes, collections of garbage and deletions of names that run at the same time on a simulated store, in random schedules.
//! Each operation takes effect at a random time within an hour; answers are lost, with the operation or before it takes effect;
//! processes stand still for up to weeks between operations, and die. No chunk of an image that a name has is ever lost.
//!
//! `SPILLWAY_SCHEDULES=N` sets the number of schedules, `SPILLWAY_SEED=N` the first. One that fails says both.
#![allow(clippy::unwrap_used)]

use spillway_registry::{
    ChunkSource, CollectOrder, Index, ListedObject, Objects, PushOrder, RegistryError, RegistryErrorKind,
    chunk_key, collect, push,
};
use spillway_testkit::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;
const CHUNK: u64 = 1 << 20;

#[derive(Clone)]
enum Op {
    Get(String),
    Exists(String),
    Put(String, Vec<u8>),
    Create(String, Vec<u8>),
    List(String),
    Delete(Vec<String>),
    Pause(i64),
}

enum Answer {
    Object(Option<Vec<u8>>),
    Flag(bool),
    Done,
    List(Vec<ListedObject>),
    /// There is none.
    Lost,
}

/// Nobody waits for the answer.
const NOBODY: usize = usize::MAX;

/// An operation that was issued. It takes effect once, and its answer may be taken afterwards.
struct Issued {
    task: usize,
    op: Op,
    at: i64,
    answer: Option<Answer>,
    is_delivered: bool,
    waker: Waker,
}

#[derive(Default)]
struct World {
    seconds: i64,
    objects: BTreeMap<String, (Vec<u8>, i64)>,
    issued: BTreeMap<u64, Issued>,
    last: u64,
    running: usize,
    /// Names whose push has succeeded, with all objects that they need.
    settled: BTreeMap<String, Vec<String>>,
    /// Names that somebody deletes, at some time.
    deleted: BTreeSet<String>,
}

#[derive(Clone)]
struct Store(Arc<Mutex<World>>);

impl Store {
    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    async fn ask(&self, op: Op) -> Result<Answer, RegistryError> {
        match (Asked { store: self.clone(), op: Some(op), id: 0 }).await {
            Answer::Lost => Err(RegistryError::new(RegistryErrorKind::Unreachable, "no answer")),
            answer => Ok(answer),
        }
    }
}

struct Asked {
    store: Store,
    op: Option<Op>,
    id: u64,
}

impl Future for Asked {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answer> {
        let store = self.store.clone();
        let mut world = store.world();
        if let Some(op) = self.op.take() {
            world.last += 1;
            self.id = world.last;
            let (task, at) = (world.running, world.seconds);
            let waker = cx.waker().clone();
            world.issued.insert(self.id, Issued { task, op, at, answer: None, is_delivered: false, waker });
            return Poll::Pending;
        }
        let issued = world.issued.get_mut(&self.id).unwrap();
        if !issued.is_delivered {
            issued.waker = cx.waker().clone();
            return Poll::Pending;
        }
        let issued = world.issued.remove(&self.id).unwrap();
        Poll::Ready(issued.answer.unwrap())
    }
}

impl World {
    fn carry_out(&mut self, op: &Op) -> Answer {
        let now = self.seconds;
        match op.clone() {
            Op::Get(key) => Answer::Object(self.objects.get(&key).map(|(bytes, _)| bytes.clone())),
            Op::Exists(key) => Answer::Flag(self.objects.contains_key(&key)),
            Op::Put(key, bytes) => {
                self.objects.insert(key, (bytes, now));
                Answer::Done
            }
            Op::Create(key, bytes) => {
                let is_new = !self.objects.contains_key(&key);
                if is_new {
                    self.objects.insert(key, (bytes, now));
                }
                Answer::Flag(is_new)
            }
            Op::List(folder) => {
                let prefix = format!("{folder}/");
                let below =
                    self.objects.range(prefix.clone()..).take_while(|(key, _)| key.starts_with(&prefix));
                let listed = below.map(|(key, (bytes, modified))| ListedObject {
                    key: key.clone(),
                    modified_seconds: *modified,
                    size_bytes: bytes.len() as u64,
                });
                Answer::List(listed.collect())
            }
            Op::Delete(keys) => {
                for key in keys {
                    self.objects.remove(&key);
                }
                Answer::Done
            }
            Op::Pause(_) => Answer::Done,
        }
    }

    /// What a name that a push has reported needs, and is not there.
    fn lost(&self) -> Option<String> {
        self.settled.iter().find_map(|(name, needed)| {
            let lost = needed.iter().find(|key| !self.objects.contains_key(*key))?;
            Some(format!("{name} needs {lost}"))
        })
    }
}

/// All objects that the name of an image needs.
fn needed(name: &str, index: &Index) -> Vec<String> {
    let root: String = index.root().iter().map(|byte| format!("{byte:02x}")).collect();
    let image = ["json", "caibx"].map(|end| format!("images/{root}/image.{end}"));
    index.digests.iter().map(chunk_key).chain(image).chain([name.to_owned()]).collect()
}

impl Objects for Store {
    async fn get(&self, key: &str, _: u64) -> Result<Option<Vec<u8>>, RegistryError> {
        match self.ask(Op::Get(key.into())).await? {
            Answer::Object(object) => Ok(object),
            _ => unreachable!(),
        }
    }

    async fn exists(&self, key: &str) -> Result<bool, RegistryError> {
        match self.ask(Op::Exists(key.into())).await? {
            Answer::Flag(flag) => Ok(flag),
            _ => unreachable!(),
        }
    }

    async fn put(&self, key: &str, content: Vec<u8>) -> Result<(), RegistryError> {
        self.ask(Op::Put(key.into(), content)).await.map(drop)
    }

    async fn create(&self, key: &str, content: Vec<u8>) -> Result<bool, RegistryError> {
        match self.ask(Op::Create(key.into(), content)).await? {
            Answer::Flag(flag) => Ok(flag),
            _ => unreachable!(),
        }
    }

    async fn list(&self, folder: &str) -> Result<Vec<ListedObject>, RegistryError> {
        match self.ask(Op::List(folder.into())).await? {
            Answer::List(listed) => Ok(listed),
            _ => unreachable!(),
        }
    }

    async fn delete(&self, keys: Vec<String>) -> Result<(), RegistryError> {
        self.ask(Op::Delete(keys)).await.map(drop)
    }

    async fn pause(&self, seconds: u64) {
        assert!(self.ask(Op::Pause(seconds as i64)).await.is_ok());
    }
}

struct Again(AtomicBool);

impl Wake for Again {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The frames say nothing: who pushes does not look at them.
struct Frames;

impl ChunkSource for Frames {
    async fn frame(&self, chunk: usize) -> Result<Vec<u8>, RegistryError> {
        Ok(vec![chunk as u8])
    }

    fn settled(&self, _: u64) {}
}

type Task = Pin<Box<dyn Future<Output = ()>>>;

async fn push_one(store: Store, days: u64, name: String, version: u32, index: Index, id: String) {
    store.pause(days * DAY as u64).await;
    let mut pushed = Err(RegistryError::new(RegistryErrorKind::Unreachable, "it was never asked"));
    // Who got no answer tries again.
    for attempt in 0..4 {
        let id = format!("{id}-{attempt}");
        let order = PushOrder { name: &name, version, index: &index, signature: None, id: &id };
        pushed = push(&store, &Frames, &order).await;
        if !pushed.as_ref().is_err_and(|e| e.kind == RegistryErrorKind::Unreachable) {
            break;
        }
        store.pause(600).await;
    }
    match pushed {
        Ok(report) => {
            let all = report.shared_chunks + report.found_chunks + report.sent_chunks;
            assert_eq!(report.chunks, all);
            let mut world = store.world();
            let key = format!("names/{name}/{version}");
            if !world.deleted.contains(&key) {
                let needed = needed(&key, &index);
                world.settled.insert(key, needed);
            }
        }
        Err(e) => {
            assert!(
                matches!(
                    e.kind,
                    RegistryErrorKind::Exists
                        | RegistryErrorKind::Busy
                        | RegistryErrorKind::Damaged
                        | RegistryErrorKind::Unreachable
                ),
                "{e}"
            );
        }
    }
}

async fn collect_often(store: Store, passes: u32, id: String) {
    for pass in 0..passes {
        let clock = {
            let store = store.clone();
            move || store.world().seconds
        };
        let id = format!("{id}-{pass}");
        let order = CollectOrder { clock, grace_seconds: 7 * DAY, gap_seconds: DAY, deletes: true, id: &id };
        if let Err(e) = collect(&store, &order).await {
            // A name that a dead push has left, a stop of hours in a deletion, or no answer.
            let known =
                [RegistryErrorKind::Absent, RegistryErrorKind::Unreachable, RegistryErrorKind::Damaged];
            assert!(known.contains(&e.kind), "{e}");
        }
        // A second more than the least time between two passes.
        store.pause(DAY as u64 + 1).await;
    }
}

/// Deletes a name, as an administrator does.
async fn delete_name(store: Store, days: u64, key: String) {
    store.pause(days * DAY as u64).await;
    while store.ask(Op::Delete(vec![key.clone()])).await.is_err() {}
}

/// Whether everything that can lose a chunk happened in a schedule.
#[derive(Default)]
struct Seen {
    pushed: u64,
    chunks_deleted: u64,
    died: u64,
    lost: u64,
}

fn image(random: &mut Rng) -> Index {
    let count = 1 + random.below(3);
    let digests = (0..count).map(|_| [1 + random.below(5) as u8; 32]).collect();
    Index { size_bytes: count * CHUNK, chunk_bytes: CHUNK, digests }
}

fn run(seed: u64, seen: &mut Seen) {
    let random = &mut Rng::new(seed);
    let store = Store(Arc::default());
    store.world().seconds = 1000 * DAY;
    store.world().objects.insert("spillway.json".into(), (b"{\"format\":1}".to_vec(), 0));
    // Garbage of before.
    for n in 1..=5u8 {
        if random.below(2) == 0 {
            store.world().objects.insert(chunk_key(&[n; 32]), (vec![n], 900 * DAY));
        }
    }
    let mut tasks: Vec<Option<Task>> = Vec::new();
    let names = ["a", "b"];
    for n in 0..1 + random.below(3) {
        let (name, version) = (names[random.below(2) as usize].to_owned(), 1 + random.below(2) as u32);
        let pushes =
            push_one(store.clone(), random.below(4), name, version, image(random), format!("push-{n}"));
        tasks.push(Some(Box::pin(pushes)));
    }
    for n in 0..1 + random.below(2) {
        let passes = 2 + random.below(20) as u32;
        tasks.push(Some(Box::pin(collect_often(store.clone(), passes, format!("gc-{n}")))));
    }
    if random.below(3) == 0 {
        let name = format!("names/{}/1", names[random.below(2) as usize]);
        store.world().deleted.insert(name.clone());
        tasks.push(Some(Box::pin(delete_name(store.clone(), random.below(10), name))));
    }
    // One process dies, one stands still for weeks; which one is fastest changes now and then.
    let dies = (random.below(4) == 0).then(|| random.below(60));
    let stands =
        (random.below(2) == 0).then(|| (random.below(60), random.below(tasks.len() as u64) as usize));
    let loses = random.below(2) == 0;
    let mut still: Option<(usize, i64)> = None;
    let mut fastest = 0;
    let poll = |tasks: &mut Vec<Option<Task>>, n: usize| {
        store.world().running = n;
        let again = Arc::new(Again(AtomicBool::new(true)));
        let waker = Waker::from(Arc::clone(&again));
        // A set of futures now and then wants to be polled once more.
        while again.0.swap(false, Ordering::Relaxed) {
            let Some(task) = &mut tasks[n] else { return };
            if task.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                tasks[n] = None;
            }
        }
    };
    for n in 0..tasks.len() {
        poll(&mut tasks, n);
    }
    let mut step = 0;
    while tasks.iter().any(Option::is_some) {
        step += 1;
        assert!(step < 100_000, "seed {seed}: it does not end");
        if dies == Some(step) {
            let n = random.below(tasks.len() as u64) as usize;
            // What it has issued may take effect, its answers are nobody's.
            seen.died += u64::from(tasks[n].take().is_some());
            continue;
        }
        let mut world = store.world();
        if let Some((_, task)) = stands.filter(|(at, _)| *at == step) {
            still = Some((task, world.seconds + (8 + random.below(12) as i64) * DAY));
        }
        if random.below(16) == 0 {
            fastest = random.below(tasks.len() as u64) as usize;
        }
        let pass = match random.below(200) {
            0 => random.below(3) as i64 * DAY,
            1..=4 => random.below(3) as i64 * HOUR,
            _ => random.below(60) as i64,
        };
        // Everything issued takes effect within an hour; a pause ends when it is over.
        let ends = |issued: &Issued| match issued.op {
            Op::Pause(seconds) => issued.at + seconds,
            _ => issued.at + HOUR,
        };
        let is_undone = |issued: &&Issued| issued.answer.is_none();
        let is_pause = |issued: &Issued| matches!(issued.op, Op::Pause(_));
        let operations = world.issued.values().filter(is_undone).filter(|issued| !is_pause(issued));
        let latest = operations.map(ends).min().unwrap_or(i64::MAX);
        world.seconds = (world.seconds + pass).min(latest.max(world.seconds));
        let now = world.seconds;
        still = still.filter(|(_, until)| *until > now);
        let all = || world.issued.iter().filter(|(_, issued)| issued.answer.is_none());
        let undone: Vec<u64> =
            all().filter(|(_, issued)| !is_pause(issued) || ends(issued) <= now).map(|(id, _)| *id).collect();
        let due = all().find(|(_, issued)| !is_pause(issued) && ends(issued) <= now).map(|(id, _)| *id);
        let may_go = |task: usize| {
            tasks.get(task).is_some_and(Option::is_some) && still.is_none_or(|(stands, _)| stands != task)
        };
        let answered =
            world.issued.iter().filter(|(_, issued)| issued.answer.is_some() && may_go(issued.task));
        let mut done: Vec<u64> = answered.map(|(id, _)| *id).collect();
        if undone.is_empty() && done.is_empty() {
            // Nothing can happen before the next pause is over, or who stands still goes on.
            let pauses = world.issued.values().filter(is_undone).map(ends);
            let next = pauses.chain(still.map(|(_, until)| until)).min();
            world.seconds = next
                .unwrap_or_else(|| panic!("SPILLWAY_SEED={seed} SPILLWAY_SCHEDULES=1: it waits for nothing"));
            continue;
        }
        if random.below(8) != 0 && done.iter().any(|id| world.issued[id].task == fastest) {
            done.retain(|id| world.issued[id].task == fastest);
        }
        let waited_for = undone.iter().copied().filter(|id| {
            let issued = &world.issued[id];
            !is_pause(issued) && tasks.get(issued.task).is_some_and(Option::is_some)
        });
        let waited_for: Vec<u64> = waited_for.collect();
        if loses && !waited_for.is_empty() && random.below(40) == 0 {
            let id = waited_for[random.below(waited_for.len() as u64) as usize];
            let (op, at) = (world.issued[&id].op.clone(), world.issued[&id].at);
            match random.below(3) {
                0 => _ = world.carry_out(&op),
                // It takes effect later.
                1 => {
                    world.last += 1;
                    let waker = Waker::noop().clone();
                    let later = Issued { task: NOBODY, op, at, answer: None, is_delivered: false, waker };
                    let last = world.last;
                    world.issued.insert(last, later);
                }
                // It never does.
                _ => {}
            }
            world.issued.get_mut(&id).unwrap().answer = Some(Answer::Lost);
            seen.lost += 1;
            if let Some(lost) = world.lost() {
                panic!("SPILLWAY_SEED={seed} SPILLWAY_SCHEDULES=1: {lost}");
            }
            continue;
        }
        let carries = due.is_some() || done.is_empty() || (!undone.is_empty() && random.below(2) == 0);
        if carries {
            let id = due.unwrap_or_else(|| undone[random.below(undone.len() as u64) as usize]);
            let op = world.issued[&id].op.clone();
            let before = world.objects.len();
            let answer = world.carry_out(&op);
            if let Op::Delete(keys) = &op
                && keys.iter().any(|key| key.starts_with("chunks/"))
            {
                seen.chunks_deleted += (before - world.objects.len()) as u64;
            }
            world.issued.get_mut(&id).unwrap().answer = Some(answer);
            if let Some(lost) = world.lost() {
                panic!("SPILLWAY_SEED={seed} SPILLWAY_SCHEDULES=1: {lost}");
            }
        } else {
            let id = done[random.below(done.len() as u64) as usize];
            let issued = world.issued.get_mut(&id).unwrap();
            issued.is_delivered = true;
            let (task, waker) = (issued.task, issued.waker.clone());
            drop(world);
            waker.wake();
            poll(&mut tasks, task);
            let world = store.world();
            if let Some(lost) = world.lost() {
                panic!("SPILLWAY_SEED={seed} SPILLWAY_SCHEDULES=1: {lost}");
            }
        }
    }
    // What was asked for and has had no effect yet may still have it, in any order.
    let mut world = store.world();
    let late = world.issued.values().filter(|issued| issued.answer.is_none());
    let mut late: Vec<Op> = late.map(|issued| issued.op.clone()).collect();
    while !late.is_empty() {
        let op = late.swap_remove(random.below(late.len() as u64) as usize);
        world.carry_out(&op);
        if let Some(lost) = world.lost() {
            panic!("SPILLWAY_SEED={seed} SPILLWAY_SCHEDULES=1: {lost}");
        }
    }
    seen.pushed += world.settled.len() as u64;
}

#[test]
fn no_schedule_loses_a_chunk_that_a_name_needs() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let mut seen = Seen::default();
    let schedules = number("SPILLWAY_SCHEDULES").unwrap_or(20_000);
    let first = number("SPILLWAY_SEED").unwrap_or(0);
    println!("SPILLWAY_SEED={first} SPILLWAY_SCHEDULES={schedules}");
    for seed in first..first + schedules {
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(seed, &mut seen)));
        if let Err(panic) = run {
            eprintln!("again: SPILLWAY_SEED={seed} SPILLWAY_SCHEDULES=1");
            std::panic::resume_unwind(panic);
        }
    }
    println!(
        "{schedules} schedules: {} names, {} chunks deleted, {} processes died, {} answers lost",
        seen.pushed, seen.chunks_deleted, seen.died, seen.lost
    );
    // Few schedules, as after a failure, need not have everything.
    if schedules >= 1000 {
        assert!(seen.pushed > schedules / 4);
        assert!([seen.chunks_deleted, seen.died, seen.lost].into_iter().all(|count| count > schedules / 20));
    }
}
