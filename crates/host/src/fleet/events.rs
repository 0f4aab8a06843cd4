//! Events of all hosts of the fleet as one stream. Owns the connections to the hosts, and where each has been read to.
//!
//! Invariant: of each host all events come, in its order, or an event of kind `lost` says that some are gone. What waits for a reader is
//! bounded: a slow one keeps the hosts waiting.

use super::service::FleetService;
use axum::body::Body;
use axum::http::Request;
use futures_util::stream::{self, Stream};
use http_body_util::BodyExt;
use spillway_api::client::{EventLines, query};
use spillway_api::{Event, EventId, FleetEvent, FleetEventRequest, Name};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Events that wait for the reader, of all hosts together.
const WAITING: usize = 64;
/// Time until a host must begin to answer.
const HEAD: Duration = Duration::from_secs(5);
/// Longest silence of a host: an idle one sends a comment each 15 s.
const SILENCE: Duration = Duration::from_secs(60);
/// Pause before a host that cannot be asked is asked again.
const PAUSE: Duration = Duration::from_secs(2);

/// Follows the events of all hosts, also of those that join later.
pub fn follow(service: FleetService, request: FleetEventRequest) -> impl Stream<Item = FleetEvent> + Send {
    let (sender, receiver) = mpsc::channel(WAITING);
    // Ends with the stream.
    let mut watching = JoinSet::new();
    watching.spawn(watch(service, request, sender));
    stream::unfold((receiver, watching), |(mut receiver, watching)| async move {
        let event = receiver.recv().await?;
        Some((event, (receiver, watching)))
    })
}

/// The hosts that are followed, and where others were left.
struct FollowedHosts {
    now: BTreeSet<Name>,
    after: BTreeMap<Name, EventId>,
}

impl FollowedHosts {
    /// Takes the hosts that there are. Returns those that nobody follows, and the last events that were read of them.
    fn begin(&mut self, known: impl Iterator<Item = Name>) -> Vec<(Name, Option<EventId>)> {
        let new: Vec<Name> = known.filter(|host| self.now.insert(host.clone())).collect();
        new.into_iter().map(|host| (host.clone(), self.after.get(&host).copied())).collect()
    }

    /// Takes that a host is not followed any more, because it was removed.
    fn end(&mut self, host: Name, last: Option<EventId>) {
        self.now.remove(&host);
        self.after.extend(last.map(|last| (host, last)));
    }
}

/// Follows each host once at a time. One that is removed and comes back is followed again, from where it was left.
async fn watch(service: FleetService, request: FleetEventRequest, events: mpsc::Sender<FleetEvent>) {
    let mut view = service.subscribe();
    let mut followed = FollowedHosts { now: BTreeSet::new(), after: request.after };
    let mut hosts = JoinSet::new();
    loop {
        let new = followed.begin(view.borrow_and_update().hosts.keys().cloned());
        for (host, after) in new {
            let (service, events) = (service.clone(), events.clone());
            hosts.spawn(HostFollower { service, host, after, limit: request.limit, events }.run());
        }
        tokio::select! {
            changed = view.changed() => if changed.is_err() { return },
            Some(ended) = hosts.join_next() => {
                if let Ok((host, last)) = ended {
                    followed.end(host, last);
                }
            }
            () = events.closed() => return,
        }
    }
}

/// Follows one host.
struct HostFollower {
    service: FleetService,
    host: Name,
    after: Option<EventId>,
    limit: u32,
    events: mpsc::Sender<FleetEvent>,
}

impl HostFollower {
    /// Follows the host until it is removed, or nobody reads the events. Returns the last event that was read.
    async fn run(mut self) -> (Name, Option<EventId>) {
        self.read_on().await;
        (self.host, self.after)
    }

    async fn read_on(&mut self) {
        let mut is_told = false;
        loop {
            let before = self.after;
            let Some(why) = self.read().await else { return };
            is_told &= self.after == before;
            if !std::mem::replace(&mut is_told, true) {
                let item = FleetEvent { host: self.host.clone(), event: None, unreachable: Some(why) };
                if self.events.send(item).await.is_err() {
                    return;
                }
            }
            sleep(PAUSE).await;
            if !self.service.view().hosts.contains_key(&self.host) {
                return;
            }
        }
    }

    /// Reads until the connection ends. Returns why it has; `None`: nobody reads the events any more.
    async fn read(&mut self) -> Option<String> {
        let parameters = match self.after {
            Some(after) => query([("after", after.to_string())]),
            None => query([("limit", self.limit.max(1).to_string())]),
        };
        let request = Request::get(format!("/v1/event-stream{parameters}")).body(Body::empty());
        let Ok(request) = request else { return Some("its events cannot be asked for".into()) };
        let response = match self.service.door().client.send(&self.host, request, HEAD).await {
            Ok(response) if response.status().is_success() => response,
            Ok(response) => return Some(format!("it answers {}", response.status())),
            Err(e) => return Some(e.to_string()),
        };
        // Without past events only their ids are taken.
        let mut left_out = (self.after.is_none() && self.limit == 0).then_some(1);
        let (mut body, mut lines) = (response.into_body(), EventLines::default());
        loop {
            let frame = match timeout(SILENCE, body.frame()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(e))) => return Some(e.to_string()),
                Ok(None) => return Some("it has ended the connection".into()),
                Err(_) => return Some(format!("it has sent nothing for {} s", SILENCE.as_secs())),
            };
            let Ok(bytes) = frame.into_data() else { continue };
            if !lines.take(&bytes) {
                return Some("it has sent an event that is too long".into());
            }
            while let Some(data) = lines.next_event() {
                let Ok(event) = serde_json::from_slice::<Event>(&data) else {
                    return Some("it has sent an event that is not understood".into());
                };
                self.after = Some(event.id);
                if left_out.take_if(|left| *left > 0).is_some() {
                    continue;
                }
                let item = FleetEvent { host: self.host.clone(), event: Some(event), unreachable: None };
                self.events.send(item).await.ok()?;
            }
        }
    }
}

/// The last events of all hosts that answer, at most so many of all together, oldest first; and why others do not.
pub async fn newest(service: &FleetService, limit: usize) -> Vec<FleetEvent> {
    let hosts: Vec<Name> = service.view().hosts.keys().cloned().collect();
    let path = format!("/v1/events?limit={limit}");
    let answers = service.ask_all::<spillway_api::List<Event>>(&hosts, &path).await;
    let mut unreachable = Vec::new();
    let mut events = BTreeMap::new();
    for (host, answer) in answers {
        match answer {
            Ok(list) => {
                for event in list.items {
                    let item =
                        FleetEvent { host: host.clone(), event: Some(event.clone()), unreachable: None };
                    events.insert((event.time, host.clone(), event.id.number), item);
                }
            }
            Err(why) => unreachable.push(FleetEvent { host, event: None, unreachable: Some(why) }),
        }
    }
    let skipped = events.len().saturating_sub(limit);
    events.into_values().skip(skipped).chain(unreachable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_comes_back_is_followed_again_from_where_it_was_left() {
        let name = |text: &str| text.parse::<Name>().unwrap();
        let id = |number| EventId { history: 1, number };
        let mut hosts = FollowedHosts { now: BTreeSet::new(), after: BTreeMap::from([(name("a"), id(5))]) };
        let known = || [name("a"), name("b")].into_iter();
        assert_eq!(hosts.begin(known()), [(name("a"), Some(id(5))), (name("b"), None)]);
        assert_eq!(hosts.begin(known()), []);
        hosts.end(name("a"), Some(id(9)));
        assert_eq!(hosts.begin([name("b")].into_iter()), [], "it was removed");
        assert_eq!(hosts.begin(known()), [(name("a"), Some(id(9)))]);
    }
}
