//! Rules and states through the public interface. One binary, because each binary is linked separately.

mod rules_docs;
mod rules_explain;
mod rules_firewalls;
mod rules_index;
mod rules_language;
mod rules_limits;
mod rules_match;
mod rules_names;
mod rules_noise;
mod rules_related;
mod rules_reload;
mod rules_reply;
mod rules_snapshot;
mod rules_stories;
mod rules_threads;
mod rules_whole;
mod rules_yanet;
mod state_fragments;
mod state_life;
mod state_model;
mod state_related;
mod state_room;
mod state_stories;
mod state_threads;
