//! Lists in pages. Owns the continuation of a list.
//!
//! Invariant: one page is in memory at a time, whatever the length of the list.

use super::{Client, ClientError, query};
use crate::{MOST_ON_A_PAGE, Page};
use serde::de::DeserializeOwned;
use std::marker::PhantomData;

/// Iterates over the pages of a list, each requested when needed. Ends after an error.
pub struct Pages<'a, T> {
    client: &'a Client,
    path: String,
    /// Token of the next page, empty for the first; `None` at the end.
    next: Option<String>,
    /// Number of objects that are still wanted; `None`: all.
    left: Option<usize>,
    of: PhantomData<T>,
}

impl<'a, T> Pages<'a, T> {
    pub(super) fn new(client: &'a Client, path: &str, most: Option<u32>) -> Pages<'a, T> {
        let left = most.map(|most| most as usize);
        Pages { left, ..Pages::after(client, path, Some(String::new())) }
    }

    /// Starts at the page of this token.
    pub(super) fn after(client: &'a Client, path: &str, next: Option<String>) -> Pages<'a, T> {
        Pages { client, path: path.to_owned(), next, left: None, of: PhantomData }
    }

    /// Path of the page of this token.
    fn path(&self, token: &str) -> String {
        let limit = self.left.unwrap_or(MOST_ON_A_PAGE).min(MOST_ON_A_PAGE);
        let token = Some(("continue", token.to_owned())).filter(|(_, token)| !token.is_empty());
        let part = query([("limit", limit.to_string())].into_iter().chain(token));
        let part = if self.path.contains('?') { part.replacen('?', "&", 1) } else { part };
        format!("{}{part}", self.path)
    }
}

impl<T: DeserializeOwned> Iterator for Pages<'_, T> {
    type Item = Result<Vec<T>, ClientError>;

    fn next(&mut self) -> Option<Result<Vec<T>, ClientError>> {
        let token = self.next.take().filter(|_| self.left != Some(0))?;
        let Page { mut items, next } = match self.client.get::<Page<T>>(&self.path(&token)) {
            Ok(page) => page,
            Err(e) => return Some(Err(e)),
        };
        if next.as_ref() == Some(&token) || (next.is_some() && items.is_empty()) {
            return Some(Err(self.client.broken("its list does not go on".into())));
        }
        if let Some(left) = &mut self.left {
            items.truncate(*left);
            *left -= items.len();
        }
        self.next = next;
        Some(Ok(items))
    }
}
