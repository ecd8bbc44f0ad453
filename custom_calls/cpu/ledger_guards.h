// What each guard objects to. Which events it guards, and in which order, is in the tables.
#pragma once

#include <optional>

#include "ledger_facts.h"

namespace blockcompact::ledger {

// The first objection to an event whose kind exists, if any.
std::optional<Outcome> Judge(const Facts& facts);

}  // namespace blockcompact::ledger
