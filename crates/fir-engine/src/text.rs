//! Stop texts: what may be shown of an answer while it may yet turn out to end it.

/// Looks for stop texts in text that comes in pieces, and holds back what may be the start of one.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopText {
    stops: Vec<String>,
    /// Whether the stop text is part of the answer.
    kept: bool,
    held: String,
}

impl StopText {
    pub(crate) fn new(stops: Vec<String>, kept: bool) -> Self {
        Self { stops, kept, held: String::new() }
    }

    /// Adds `text`; returns what is certain, and which stop text ended it.
    ///
    /// The stop text that ends first counts; of those that end together, the one that starts first.
    pub(crate) fn push(&mut self, text: String) -> (String, Option<usize>) {
        if self.stops.is_empty() {
            return (text, None);
        }
        self.held.push_str(&text);
        let found = |(i, s): (usize, &String)| self.held.find(s.as_str()).map(|at| (at + s.len(), at, i));
        if let Some((end, at, which)) = self.stops.iter().enumerate().filter_map(found).min() {
            self.held.truncate(if self.kept { end } else { at });
            return (std::mem::take(&mut self.held), Some(which));
        }
        let starts = |at: &usize| self.stops.iter().any(|s| s.starts_with(&self.held[*at..]));
        let at = self.held.char_indices().map(|(at, _)| at).find(starts).unwrap_or(self.held.len());
        let rest = self.held.split_off(at);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// What was held back, when no more comes.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_start_of_a_stop_text_is_held_back_and_given_when_it_is_none() {
        let mut stop = StopText::new(vec!["END".into(), "\n\n".into()], false);
        assert_eq!(stop.push("one E".into()), ("one ".into(), None));
        assert_eq!(stop.push("N".into()), (String::new(), None));
        assert_eq!(stop.push("d\n".into()), ("ENd".into(), None));
        assert_eq!(stop.push("\nmore".into()), (String::new(), Some(1)));
        let mut stop = StopText::new(vec!["éa".into()], false);
        assert_eq!(stop.push("xé".into()), ("x".into(), None));
        assert_eq!(stop.finish(), "é");
        let mut stop = StopText::new(vec!["END".into()], true);
        assert_eq!(stop.push("the E".into()), ("the ".into(), None));
        assert_eq!(stop.push("ND.".into()), ("END".into(), Some(0)));
    }

    proptest! {
        /// However the text is cut, what comes out is the text before the stop text that ends first.
        #[test]
        fn any_cut_gives_the_same_text(
            text in "[abé]{0,24}",
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            cuts in prop::collection::vec(0..30usize, 0..8),
        ) {
            let mut pieces: Vec<&str> = Vec::new();
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|&c| text.is_char_boundary(c)).chain([0, text.len()]).collect();
            cuts.sort_unstable();
            pieces.extend(cuts.windows(2).map(|w| &text[w[0]..w[1]]));
            let mut stop = StopText::new(stops.clone(), false);
            let (mut got, mut stopped) = (String::new(), false);
            for piece in pieces {
                let (text, end) = stop.push(piece.into());
                got += &text;
                // Nothing is shown that is part of a stop text to come.
                prop_assert!(!stops.iter().any(|s| got.contains(s.as_str())));
                if end.is_some() {
                    stopped = true;
                    break;
                }
            }
            if !stopped {
                got += &stop.finish();
            }
            let ends = |end: usize| {
                let part = text.is_char_boundary(end).then(|| &text[..end]);
                part.and_then(|p| stops.iter().filter(|s| p.ends_with(s.as_str())).map(|s| end - s.len()).min())
            };
            let want = (0..=text.len()).find_map(ends);
            prop_assert_eq!(stopped, want.is_some());
            prop_assert_eq!(got.as_str(), &text[..want.unwrap_or(text.len())]);
        }
    }
}
