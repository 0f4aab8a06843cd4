//! Sessions of browsers: a token is shown once, and a cookie stands for it from then on. Owns the table of sessions, in memory; a
//! restart of the daemon ends them.
//!
//! Invariant: a session is worth what its token is worth at the moment of each request: it ends with the token, and with its time.

use super::Role;
use super::caller::PeerAddress;
use super::tokens::{TokenHash, Tokens};
use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};
use spillway_control::secret;
use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Longest time of a session.
pub const LIFETIME: Duration = Duration::from_secs(12 * 3600);
/// Name of the cookie. Browsers take one of this prefix only over TLS, for this host alone and for all paths (RFC 6265bis, 4.1.3.2).
const COOKIE: &str = "__Host-spillway";
/// Sessions of a token, the oldest of which ends for a new one; and of all tokens.
const MOST_OF_TOKEN: usize = 64;
const MOST: usize = 1024;

/// What a browser sends for its session: 32 random bytes as hexadecimal digits.
pub struct SessionId(String);

#[derive(Clone, Copy)]
struct Session {
    token: TokenHash,
    ends: Instant,
}

/// Times that a token may log in within 10 minutes: each is a line in the audit log.
const MOST_LOGINS: usize = 100;
const WINDOW: Duration = Duration::from_secs(600);
/// Requests to log in that are under way: of an address, and of all.
const MOST_PLACES_OF_SOURCE: usize = 4;
const MOST_PLACES: usize = 64;

/// The open sessions, by the hash of what browsers send.
#[derive(Default)]
pub struct Sessions {
    open: Mutex<HashMap<[u8; 32], Session>>,
    /// When tokens have logged in lately.
    logins: Mutex<HashMap<TokenHash, Vec<Instant>>>,
    /// Where requests to log in that are under way come from.
    places: Mutex<Vec<PeerAddress>>,
}

/// A request to log in.
pub struct LoginPlace<'a> {
    sessions: &'a Sessions,
    source: PeerAddress,
}

impl Drop for LoginPlace<'_> {
    fn drop(&mut self) {
        let mut places = locked(&self.sessions.places);
        if let Some(at) = places.iter().position(|source| *source == self.source) {
            places.swap_remove(at);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The owner of a session.
pub struct SessionOwner {
    /// Name of the token.
    pub name: String,
    /// Role of the token now.
    pub role: Role,
    /// How long the session lasts.
    pub left: Duration,
}

impl Sessions {
    /// A place for a request to log in. None: there are too many.
    pub fn place(&self, source: PeerAddress) -> Option<LoginPlace<'_>> {
        let source = source.counted();
        let mut places = locked(&self.places);
        let own = places.iter().filter(|other| **other == source).count();
        if own >= MOST_PLACES_OF_SOURCE || places.len() >= MOST_PLACES {
            return None;
        }
        places.push(source);
        Some(LoginPlace { sessions: self, source })
    }

    /// Whether the token may log in once more now. It counts as if it did.
    pub fn may_open(&self, token: TokenHash) -> bool {
        let mut logins = locked(&self.logins);
        logins.retain(|_, times| {
            times.retain(|time| time.elapsed() < WINDOW);
            !times.is_empty()
        });
        let times = logins.entry(token).or_default();
        let may = times.len() < MOST_LOGINS;
        if may {
            times.push(Instant::now());
        }
        may
    }

    /// Ends the sessions of all tokens but these.
    pub fn keep_those_of(&self, tokens: &Tokens) {
        locked(&self.open).retain(|_, session| tokens.owner(&session.token).is_some());
    }

    /// Opens a session for a token that is known.
    ///
    /// # Errors
    /// The kernel has no random bytes.
    pub fn open(&self, token: TokenHash) -> io::Result<SessionId> {
        let id = SessionId(secret::random()?);
        let now = Instant::now();
        let mut open = locked(&self.open);
        open.retain(|_, session| session.ends > now);
        make_room(&mut open, MOST_OF_TOKEN, |session| session.token == token);
        make_room(&mut open, MOST, |_| true);
        open.insert(id.hash(), Session { token, ends: now + LIFETIME });
        Ok(id)
    }

    /// The owner of the session that a request belongs to.
    pub fn find(&self, headers: &HeaderMap, tokens: &Tokens) -> Option<SessionOwner> {
        let id = SessionId::of(headers)?;
        let session = *locked(&self.open).get(&id.hash())?;
        let left = session.ends.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
        let (name, role) = tokens.owner(&session.token)?;
        Some(SessionOwner { name, role, left })
    }

    /// Ends the session that a request belongs to. False: there is none.
    pub fn close(&self, headers: &HeaderMap) -> bool {
        SessionId::of(headers).is_some_and(|id| locked(&self.open).remove(&id.hash()).is_some())
    }
}

/// Removes the oldest of these sessions if there are so many.
fn make_room(open: &mut HashMap<[u8; 32], Session>, most: usize, is: impl Fn(&Session) -> bool) {
    if open.values().filter(|session| is(session)).count() >= most {
        let oldest = open.iter().filter(|(_, session)| is(session)).min_by_key(|(_, session)| session.ends);
        if let Some(oldest) = oldest.map(|(id, _)| *id) {
            open.remove(&oldest);
        }
    }
}

impl SessionId {
    /// The one in a request's cookies, of which HTTP/2 may send each in a header of its own (RFC 9113, 8.2.3).
    fn of(headers: &HeaderMap) -> Option<SessionId> {
        let all = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        let mut pairs =
            all.flat_map(|text| text.split(';')).filter_map(|pair| pair.trim_ascii().split_once('='));
        let (_, id) = pairs.find(|(name, _)| *name == COOKIE)?;
        (id.len() == 64).then(|| SessionId(id.into()))
    }

    /// What is kept of it: who reads the daemon's memory learns no session.
    fn hash(&self) -> [u8; 32] {
        Sha256::digest(self.0.as_bytes()).into()
    }

    /// The header that gives it to a browser.
    pub fn cookie(&self) -> String {
        format!("{COOKIE}={}; {ATTRIBUTES}; Max-Age={}", self.0, LIFETIME.as_secs())
    }
}

/// No script of a page reads it, and no page of another site sends it.
const ATTRIBUTES: &str = "Path=/; Secure; HttpOnly; SameSite=Strict";

/// The header that makes a browser forget its session.
pub fn no_cookie() -> String {
    format!("{COOKIE}=; {ATTRIBUTES}; Max-Age=0")
}

/// What browsers say about the page that has made a request (Fetch Metadata).
const CSRF_HEADER: &str = "sec-fetch-site";

/// Whether a browser says that a page of this origin has made the request (Fetch Metadata, `Sec-Fetch-Site`). None: it says nothing,
/// or is no browser.
pub fn is_of_this_origin(headers: &HeaderMap) -> Option<bool> {
    headers.get(CSRF_HEADER).map(|value| value == "same-origin")
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn tokens(lines: &str) -> Tokens {
        Tokens::parse(lines).unwrap()
    }

    fn line(role: &str, secret: &str) -> String {
        format!("{role} {secret}er {:x}\n", Sha256::digest(secret))
    }

    fn with(cookies: &[&str]) -> HeaderMap {
        let values = cookies.iter().map(|text| (header::COOKIE, HeaderValue::from_str(text).unwrap()));
        values.collect()
    }

    fn pair(id: &SessionId) -> String {
        format!("{COOKIE}={}", id.0)
    }

    #[test]
    fn a_session_is_worth_what_its_token_is_worth_now() {
        let known = tokens(&line("admin", "a"));
        let sessions = Sessions::default();
        let id = sessions.open(known.find("a").unwrap().hash).unwrap();
        let headers = with(&["theme=dark; x=y", &format!("a=b; {}", pair(&id))]);
        let role = |known: &Tokens| sessions.find(&headers, known).map(|owner| (owner.name, owner.role));
        assert_eq!(role(&known), Some(("aer".into(), Role::Admin)));
        assert!(sessions.find(&headers, &known).unwrap().left > LIFETIME - Duration::from_secs(60));
        known.become_those(tokens(&line("read", "a")));
        assert_eq!(role(&known), Some(("aer".into(), Role::Read)));
        known.become_those(tokens(&line("admin", "b")));
        assert_eq!(role(&known), None);
        known.become_those(tokens(&line("admin", "a")));
        sessions.close(&headers);
        assert_eq!(role(&known), None);
    }

    #[test]
    fn only_what_was_given_is_a_session() {
        let known = tokens(&line("admin", "a"));
        let sessions = Sessions::default();
        let id = sessions.open(known.find("a").unwrap().hash).unwrap();
        let right = pair(&id);
        let upper = right.to_uppercase();
        let (longer, other) = (format!("{right}0"), right.replace(COOKIE, "spillway"));
        for wrong in [upper.as_str(), &right[..right.len() - 1], &longer, &other, COOKIE, "", "=;;="] {
            assert!(sessions.find(&with(&[wrong]), &known).is_none(), "{wrong}");
        }
        assert!(sessions.find(&with(&[&right]), &known).is_some());
        assert!(sessions.find(&HeaderMap::new(), &known).is_none());
    }

    #[test]
    fn who_logs_in_too_often_waits() {
        let (sessions, one, other) = (Sessions::default(), [1; 32], [2; 32]);
        assert!((0..MOST_LOGINS).all(|_| sessions.may_open(one)) && !sessions.may_open(one));
        assert!(sessions.may_open(other));
        let at = |last: u8| PeerAddress::Remote([192, 0, 2, last].into());
        let mut places: Vec<_> = (0..MOST_PLACES_OF_SOURCE).map(|_| sessions.place(at(1)).unwrap()).collect();
        assert!(sessions.place(at(1)).is_none());
        let others =
            (2..).flat_map(|last| [at(last); MOST_PLACES_OF_SOURCE]).take(MOST_PLACES - places.len());
        places.extend(others.map(|source| sessions.place(source).unwrap()));
        assert!(sessions.place(at(100)).is_none());
        places.pop();
        assert!(sessions.place(at(100)).is_some());
        drop(places);
        assert!(locked(&sessions.places).is_empty());
    }

    #[test]
    fn the_oldest_session_of_a_token_ends_for_a_new_one() {
        let known = tokens(&(line("admin", "a") + &line("read", "b")));
        let sessions = Sessions::default();
        let open = |secret: &str| sessions.open(known.find(secret).unwrap().hash).unwrap();
        let is_open = |id: &SessionId| sessions.find(&with(&[&pair(id)]), &known).is_some();
        let (other, first, second) = (open("b"), open("a"), open("a"));
        let _more: Vec<_> = (2..MOST_OF_TOKEN).map(|_| open("a")).collect();
        assert!(is_open(&first));
        open("a");
        assert!(!is_open(&first) && is_open(&second) && is_open(&other));
    }
}
