//! Pages of long lists: the part that a request selects, and the response. Owns the tokens that continue a list.
//!
//! Invariant: a token names the last object of a page, so that the list continues there whatever is created or removed
//! meanwhile; the memory of a page does not grow with the list.

use base64ct::{Base64UrlUnpadded, Encoding};
use spillway_api::Page;

/// Longest token.
const MOST_TOKEN_BYTES: usize = 256;

/// Part of a list that a request selects.
#[derive(Clone, Debug)]
pub struct PageRequest {
    /// Only objects after this name; all if it is empty.
    pub after: String,
    /// Largest number of objects, at least one.
    pub most: usize,
}

/// Decodes a token: returns the name of the last object on the page that gave it; `None` if no page did.
pub fn name_of(token: &str) -> Option<String> {
    let name = (token.len() <= MOST_TOKEN_BYTES).then(|| Base64UrlUnpadded::decode_vec(token).ok()).flatten();
    let name = name.and_then(|name| String::from_utf8(name).ok());
    name.filter(|name| name.bytes().all(|b| b.is_ascii_graphic()))
}

/// Encodes the token that continues a list after this name.
fn token_of(name: &str) -> String {
    Base64UrlUnpadded::encode_string(name.as_bytes())
}

/// Collects the objects of a page.
pub struct PageBuilder<T> {
    items: Vec<T>,
    most: usize,
    last: String,
    is_cut: bool,
}

impl<T> PageBuilder<T> {
    /// Starts an empty page.
    pub fn new(part: &PageRequest) -> PageBuilder<T> {
        PageBuilder { items: Vec::new(), most: part.most, last: String::new(), is_cut: false }
    }

    /// Adds an object. Returns `false` if the page was full and the list continues after it.
    pub fn add(&mut self, name: &str, item: T) -> bool {
        self.is_cut = self.items.len() == self.most;
        if !self.is_cut {
            self.items.push(item);
            self.last = name.to_owned();
        }
        !self.is_cut
    }

    /// Returns the page.
    pub fn page(self) -> Page<T> {
        let next = self.is_cut.then(|| token_of(&self.last));
        Page { items: self.items, next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_cut_says_how_the_list_goes_on() {
        let mut page = PageBuilder::new(&PageRequest { after: String::new(), most: 2 });
        assert!(page.add("desk-1", 1) && page.add("desk-2", 2));
        let (full, mut cut) =
            (PageBuilder { items: page.items.clone(), last: page.last.clone(), ..page }, page);
        assert_eq!(full.page().next, None, "nothing comes after it");
        assert!(!cut.add("desk-3", 3));
        let page = cut.page();
        assert_eq!((page.items, page.next.as_deref().and_then(name_of)), (vec![1, 2], Some("desk-2".into())));
    }

    #[test]
    fn what_is_no_token_is_refused() {
        let long = token_of(&"x".repeat(200));
        for token in ["desk-2", "Zm8=", "Zg+", "\u{e9}", &token_of("a\nb"), &token_of("\u{e9}"), &long] {
            assert_eq!(name_of(token), None, "{token}");
        }
        assert_eq!(name_of(&token_of("desk-001/6a9c0a1e")).as_deref(), Some("desk-001/6a9c0a1e"));
    }
}
