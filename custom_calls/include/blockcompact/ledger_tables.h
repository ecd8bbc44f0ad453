// The rules of the commit ledger. Written by scripts/ledger_tables.py; do not edit.
#pragma once

// clang-format off

#include <cstdint>

namespace blockcompact::ledger {

constexpr int32_t kNoState = -1;
constexpr int32_t kNumConditions = 5;

enum class SlotState : int32_t {
    kFree = 0, kReserved = 1, kInFlight = 2, kResident = 3, kRetiring = 4};

enum class SlotEvent : int32_t {
    kReserve = 0, kIssue = 1, kCommit = 2, kAbort = 3, kEvict = 4, kQuiesce = 5, kNone = 6};

enum class OperationStage : int32_t {
    kEmpty = 0, kStaged = 1, kIssued = 2, kCommitted = 3, kDraining = 4, kClosed = 5, kAborted = 6};

enum class RequestState : int32_t {kAbsent = 0, kRunning = 1, kPreempted = 2, kFinished = 3};

enum class EventKind : int32_t {
    kAdmit = 0, kPreempt = 1, kFinish = 2, kRestart = 3, kStage = 4, kReserve = 5, kIssue = 6,
    kReach = 7, kCommit = 8, kAck = 9, kAbort = 10, kEvict = 11, kQuiesce = 12, kNone = 13};

enum class Condition : int32_t {
    kReadersDone = 0, kLanded = 1, kSideLanded = 2, kTablesWritten = 3, kCompleted = 4};

enum class Disposition : int32_t {kApplied = 0, kRepeated = 1, kIgnored = 2, kRefused = 3};

enum class Guard : int32_t {
    kInRange = 0, kProcessEpoch = 1, kNewProcessEpoch = 2, kNotRunningYet = 3, kNotOfThePast = 4,
    kNotOfTheFuture = 5, kStillRunning = 6, kSameBody = 7, kStagedOnce = 8, kRemembered = 9,
    kKnown = 10, kSameKey = 11, kNoOpenOperation = 12, kCurrentBasis = 13, kHasPlace = 14,
    kFittingStage = 15, kReservesNoMore = 16, kHasFreeSlot = 17, kFreeSlot = 18, kAllReserved = 19,
    kAwaited = 20, kReachedOnce = 21, kInOrder = 22, kAllRanksReady = 23, kSlotGeneration = 24,
    kOwnSlot = 25, kResidentSlot = 26, kNoPendingOperation = 27, kRetiringSlot = 28,
    kQuietOnce = 29};

enum class ResultCode : int32_t {
    kOk = 0, kNonFiniteScore = 1, kCandidatesOutOfRange = 2, kBudgetTooSmall = 3,
    kWantExceedsCapacity = 4, kDuplicateBlock = 5, kBlockOutOfRange = 6, kCountOutOfRange = 7,
    kUploadExceedsCapacity = 8, kPaddingExhausted = 9, kResidencyFull = 10, kPoolExhausted = 11,
    kDoubleRelease = 12, kNotOwned = 13, kStalePlan = 14, kSourceMissing = 15, kPinExists = 16,
    kPinUnknown = 17, kPinsFull = 18, kStaleBlock = 19, kEventOutOfRange = 20,
    kProcessEpochMismatch = 21, kRequestRunning = 22, kRequestNotRunning = 23, kEpochStale = 24,
    kEpochFuture = 25, kOperationRepeated = 26, kOperationConflict = 27, kOperationForgotten = 28,
    kOperationUnknown = 29, kOperationOpen = 30, kOperationsFull = 31, kOperationKeyConflict = 32,
    kOperationStage = 33, kOperationNotIssued = 34, kOperationCommitted = 35,
    kOperationAborted = 36, kAckEarly = 37, kEventRepeated = 38, kEventLate = 39,
    kReservationComplete = 40, kSlotsExhausted = 41, kSlotState = 42, kSlotStale = 43,
    kSlotOwner = 44, kConditionUnexpected = 45, kMissingReservation = 46, kMissingReaders = 47,
    kMissingTransfer = 48, kMissingSideBuffer = 49, kMissingTables = 50, kMissingCompletion = 51};

// Columns of an event, in order.
struct Event {
  int32_t kind;
  int32_t process_epoch;
  int32_t request;
  int32_t request_epoch;
  int32_t operation_id;
  int32_t pool_generation;
  int32_t map_revision;
  int32_t selection_revision;
  int32_t num_slots;
  int32_t has_side_buffer;
  int32_t body_digest;
  int32_t rank;
  int32_t condition;
  int32_t slot;
  int32_t slot_generation;
};

// Columns of a state, in order.
enum class Column : int32_t {
    kSlotsState, kSlotsGeneration, kSlotsRequest, kSlotsOperation, kSlotsQuietRanks,
    kOperationsStage, kOperationsRequest, kOperationsRequestEpoch, kOperationsOperationId,
    kOperationsPoolGeneration, kOperationsMapRevision, kOperationsSelectionRevision,
    kOperationsBodyDigest, kOperationsNumSlots, kOperationsAwaited, kOperationsReached,
    kOperationsIsLeased, kOperationsSequence, kRequestsState, kRequestsRequestEpoch,
    kRequestsPoolGeneration, kRequestsMapRevision, kRequestsSelectionRevision,
    kRequestsLastOperationId, kProcessEpoch, kNextRequestEpoch, kNextSequence, kCounts, kCount};

// [SlotState][SlotEvent]
constexpr int32_t kSlotNext[5][7] = {
    {1, -1, -1, -1, -1, -1, -1},
    {-1, 2, -1, 0, -1, -1, -1},
    {-1, -1, 3, 4, -1, -1, -1},
    {-1, -1, -1, -1, 4, -1, -1},
    {-1, -1, -1, -1, -1, 0, -1}};

constexpr int32_t kSlotEnd[5] = {6, 3, 3, 4, 6};

// [RequestState][EventKind]
constexpr int32_t kRequestNext[4][14] = {
    {1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1},
    {-1, 2, 3, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, -1},
    {1, -1, 3, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1},
    {1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}};

// [OperationStage][EventKind]
constexpr int32_t kOperationNext[7][14] = {
    {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1},
    {-1, -1, -1, -1, -1, 1, 2, -1, -1, -1, 4, -1, -1, -1},
    {-1, -1, -1, -1, -1, -1, -1, 2, 3, -1, 4, -1, -1, -1},
    {-1, -1, -1, -1, -1, -1, -1, -1, -1, 5, -1, -1, -1, -1},
    {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1},
    {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1},
    {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}};

// [OperationStage][EventKind]
constexpr int32_t kOperationCode[7][14] = {
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 0, 0, 34, 34, 37, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 33, 38, 0, 0, 37, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 33, 38, 38, 38, 0, 35, 0, 0, 0},
    {0, 0, 0, 0, 0, 36, 36, 39, 36, 39, 38, 0, 0, 0},
    {0, 0, 0, 0, 0, 33, 38, 38, 38, 38, 35, 0, 0, 0},
    {0, 0, 0, 0, 0, 36, 36, 39, 36, 39, 38, 0, 0, 0}};

constexpr int32_t kOperationEnd[7] = {0, 4, 4, 5, 4, 5, 6};

constexpr int32_t kPrerequisites[5] = {0, 0, 0, 7, 8};

constexpr int32_t kMissingCode[5] = {47, 48, 49, 50, 51};

// [Guard][EventKind]
constexpr int32_t kGuarded[30][14] = {
    {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0},
    {1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0},
    {0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0},
    {0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0},
    {0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0},
    {0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0},
    {0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0},
    {0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0},
    {0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0},
    {0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0},
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0},
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0},
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0},
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0},
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0}};

constexpr int32_t kGuardCode[30] = {
    20, 21, 21, 22, 24, 25, 23, 27, 26, 28, 29, 32, 30, 14, 31, 33, 40, 41, 42, 46, 45, 38, 47, 47,
    43, 44, 42, 30, 42, 38};

// [EventKind][column of an event]
constexpr int32_t kNamed[14][15] = {
    {0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0},
    {0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0},
    {0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0},
    {0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
    {0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0},
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0},
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}};

constexpr int32_t kDisposition[52] = {
    0, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2, 3, 1, 3, 2, 3, 3, 3,
    3, 3, 3, 3, 3, 3, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3};

constexpr int32_t kAwaitedAlways = 16;
constexpr int32_t kAwaitedWithSlots = 11;
constexpr int32_t kAwaitedWithSideBuffer = 4;

}  // namespace blockcompact::ledger

// clang-format on
